//! Networks in rules and tokens.
use crate::{Error, Reader, Result, Wire, Writer};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// An IPv4 or IPv6 network, or one address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network {
    address: IpAddr,
    /// Length of the prefix in bits.
    prefix: u8,
}

impl Network {
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(of), IpAddr::V4(at)) => {
                same_prefix(of.to_bits().into(), at.to_bits().into(), 32, self.prefix)
            }
            (IpAddr::V6(of), IpAddr::V6(at)) => same_prefix(of.to_bits(), at.to_bits(), 128, self.prefix),
            _ => false,
        }
    }
    fn prefix_max(address: IpAddr) -> u8 {
        if address.is_ipv4() { 32 } else { 128 }
    }
    /// Its first address.
    fn base(&self) -> IpAddr {
        match self.address {
            IpAddr::V4(of) => {
                let host = 32 - u32::from(self.prefix);
                IpAddr::V4(u32::MAX.checked_shl(host).map_or(0, |mask| mask & of.to_bits()).into())
            }
            IpAddr::V6(of) => {
                let host = 128 - u32::from(self.prefix);
                IpAddr::V6(u128::MAX.checked_shl(host).map_or(0, |mask| mask & of.to_bits()).into())
            }
        }
    }
}

fn same_prefix(a: u128, b: u128, bits: u32, prefix: u8) -> bool {
    (a ^ b).checked_shr(bits - u32::from(prefix)).unwrap_or(0) == 0
}

impl Wire for Network {
    fn encode(&self, w: &mut Writer) {
        self.prefix.encode(w);
        match self.address {
            IpAddr::V4(address) => {
                4_u8.encode(w);
                address.octets().encode(w);
            }
            IpAddr::V6(address) => {
                6_u8.encode(w);
                address.octets().encode(w);
            }
        }
    }
    fn decode(r: &mut Reader<'_>) -> Result<Network> {
        let prefix = u8::decode(r)?;
        let address = match u8::decode(r)? {
            4 => IpAddr::from(<[u8; 4]>::decode(r)?),
            6 => IpAddr::from(<[u8; 16]>::decode(r)?),
            n => return Err(Error::invalid(format!("malformed message: {n} is not a version of IP"))),
        };
        if prefix > Network::prefix_max(address) {
            return Err(Error::invalid(format!("malformed message: {address}/{prefix} is not a network")));
        }
        Ok(Network { address, prefix })
    }
}
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix == Network::prefix_max(self.address) {
            true => write!(f, "{}", self.address),
            false => write!(f, "{}/{}", self.address, self.prefix),
        }
    }
}
impl FromStr for Network {
    type Err = String;
    fn from_str(s: &str) -> std::result::Result<Network, String> {
        let bad = || {
            format!(
                "network {s:?}: expected an address like 10.1.2.3, or a network like 10.1.0.0/16 or 2001:db8::/32"
            )
        };
        let (address, prefix) =
            s.split_once('/').map_or((s, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let most = Network::prefix_max(address);
        let prefix = prefix.map_or(Ok(most), str::parse).map_err(|_| bad())?;
        if prefix > most {
            return Err(bad());
        }
        let network = Network { address, prefix };
        let base = network.base();
        if base != address {
            let what = format!("network {s:?}: bits of the address lie outside of its prefix");
            return Err(Error::invalid(what).hint(format!("{base}/{prefix}")).to_string());
        }
        Ok(network)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_written_as_they_are_read() {
        let network = |s: &str| s.parse::<Network>().unwrap();
        for text in ["10.1.0.0/16", "10.1.2.3", "0.0.0.0/0", "2001:db8::/32", "::1", "::/0", "10.1.2.2/31"] {
            assert_eq!(network(text).to_string(), text);
            let bytes = network(text).to_bytes();
            assert_eq!(Network::from_bytes(&bytes), Ok(network(text)));
        }
        for bad in
            ["", "10.1.0.0/33", "::/129", "10.1", "10.1.0.0/", "10.1.0.0/-1", "node-1", "10.1.0.0/16/2"]
        {
            assert!(bad.parse::<Network>().is_err(), "{bad:?}");
        }
        let beyond = "10.1.2.3/16".parse::<Network>().unwrap_err();
        assert!(beyond.ends_with("hint: 10.1.0.0/16"), "{beyond}");
        assert!(Network::from_bytes(&[33, 4, 10, 0, 0, 0]).is_err());
        let has = |net: &str, at: &str| network(net).contains(at.parse().unwrap());
        assert!(has("10.1.0.0/16", "10.1.255.255") && !has("10.1.0.0/16", "10.2.0.0"));
        assert!(has("10.1.0.0/16", "::ffff:10.1.0.7"), "as a socket of both kinds shows it");
        assert!(has("0.0.0.0/0", "255.1.1.1") && !has("0.0.0.0/0", "::1"));
        assert!(has("::/0", "2001:db8::1") && has("2001:db8::/32", "2001:db8:ffff::"));
        assert!(!has("2001:db8::/32", "2001:db9::") && has("10.1.2.3", "10.1.2.3"));
    }
}
