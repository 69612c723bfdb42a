//! Join tokens: one line of text with which a machine becomes a node of the cluster.
//!
//! `weir1.ADDRESS[,ADDRESS].PIN.SECRET`. The pin identifies the cluster to the joining machine, the secret
//! identifies the token to the cluster. The coordinator keeps only a checksum of the secret. Pure.
use crate::certificate::Pin;
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

const PREFIX: &str = "weir1.";

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Token {
    /// Addresses of coordinators, to be tried in this order: `HOST:PORT`.
    pub addrs: Vec<String>,
    pub pin: Pin,
    pub secret: Secret,
}

/// The secret of a token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 16]);

impl Secret {
    /// The coordinator stores only this.
    pub fn checksum(&self) -> [u8; 32] {
        Sha256::digest(self.0).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}.{}.{}", self.addrs.join(","), Hex(&self.pin.0), Hex(&self.secret.0))
    }
}

struct Hex<'a>(&'a [u8; 16]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Token {
    type Err = String;
    fn from_str(text: &str) -> Result<Token, String> {
        let bad = |why: &str| {
            format!("the token {why}: expected weir1.ADDRESS.PIN.SECRET, as `weir token create` prints it")
        };
        let rest = text.trim().strip_prefix(PREFIX).ok_or_else(|| bad("does not begin with weir1."))?;
        let mut parts = rest.rsplitn(3, '.');
        let mut hex = |what: &str| {
            parts
                .next()
                .and_then(from_hex)
                .ok_or_else(|| bad(&format!("has a {what} that is not 32 hexadecimal digits")))
        };
        let (secret, pin) = (Secret(hex("secret")?), Pin(hex("pin")?));
        let addrs: Vec<String> = parts.next().unwrap_or_default().split(',').map(str::to_owned).collect();
        if addrs.iter().any(|addr| !addr.contains(':')) {
            return Err(bad("names no address with a port"));
        }
        Ok(Token { addrs, pin, secret })
    }
}

fn from_hex(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    if text.len() != 32 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * n..2 * n + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_written_as_they_are_read() {
        for addrs in [&["10.1.0.2:7000"][..], &["[fe80::1]:7000", "store.example:7000"]] {
            let addrs = addrs.iter().map(|a| (*a).to_owned()).collect();
            let token = Token { addrs, pin: Pin([0x1f; 16]), secret: Secret([0xe0; 16]) };
            assert_eq!(token.to_string().parse(), Ok(token.clone()));
            assert_eq!(format!(" {token}\n").parse(), Ok(token));
        }
    }

    #[test]
    fn malformed_tokens_are_refused() {
        let good =
            Token { addrs: vec!["h:1".into()], pin: Pin([1; 16]), secret: Secret([2; 16]) }.to_string();
        for bad in [
            "",
            "weir1.",
            "weir1.h:1",
            &good[1..],
            &good[..good.len() - 1],
            &good.replace(":1", ""),
            &good.replace("02", "+2"),
        ] {
            assert!(bad.parse::<Token>().is_err(), "{bad:?}");
        }
        assert!(!format!("{:?}", good.parse::<Token>()).contains("0202"), "secrets are not shown");
    }
}
