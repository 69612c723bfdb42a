//! Addresses that other nodes can use: the ones that a node announces, and the ones that a host may try.
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use weir_env::Addr;
use weir_proto::{Error, Result};

/// The addresses to announce for a listening address. An unspecified one (`[::]`, `0.0.0.0`) stands for
/// `here`, the address from which this host reaches the coordinator (`None`: through a local socket), and for
/// `own`, the addresses from which it reaches other networks.
pub fn announced(listens: &Addr, here: Option<IpAddr>, own: &[IpAddr]) -> Result<Vec<Addr>> {
    let Addr::Tcp(at) = listens else { return Ok(vec![listens.clone()]) };
    if !at.ip().is_unspecified() {
        return Ok(vec![listens.clone()]);
    }
    let here = here.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let mut ips = vec![here];
    ips.extend(own.iter().filter(|ip| **ip != here && !ip.is_loopback()));
    ips.retain(|ip| at.is_ipv6() || ip.is_ipv4());
    if ips.is_empty() {
        return Err(Error::invalid(format!(
            "this node listens on {listens}, but this host reaches the coordinator from {here}: others \
             could not use the address"
        ))
        .hint("--listen tcp:[::]:PORT takes both kinds, --listen tcp:ADDRESS:PORT an address of this host"));
    }
    Ok(ips.into_iter().map(|ip| Addr::Tcp(SocketAddr::new(ip, at.port()))).collect())
}

/// Checks that other nodes can use an announced address.
pub fn check_announced(node: &str, addr: &str) -> Result<()> {
    let addr: Addr = addr.parse().map_err(|e| Error::invalid(format!("node {node:?}: {e}")))?;
    match addr {
        Addr::Host(_, 0) => Err(Error::invalid(format!("node {node:?} announces {addr}, which has no port"))),
        Addr::Tcp(at) if at.ip().is_unspecified() || at.port() == 0 => {
            Err(Error::invalid(format!("node {node:?} announces {addr}, which no other host can reach"))
                .hint("--listen tcp:ADDRESS:PORT with an address of its host"))
        }
        _ => Ok(()),
    }
}

/// A node's addresses in the order in which this host tries them: Unix sockets first on the same host;
/// elsewhere without these and without loopback addresses, which lead to the host itself. Text that is not an
/// address is omitted.
pub fn addrs_in_order(addrs: &[String], same_host: bool) -> Vec<Addr> {
    let mut addrs: Vec<Addr> = addrs.iter().filter_map(|a| a.parse().ok()).collect();
    addrs.retain(|a| same_host || is_for_others(a));
    addrs.sort_by_key(|a| !matches!(a, Addr::Unix(_)));
    addrs
}

/// Whether the address leads to other hosts.
pub fn is_for_others(addr: &Addr) -> bool {
    match addr {
        Addr::Tcp(at) => !at.ip().to_canonical().is_loopback(),
        Addr::Unix(_) => false,
        Addr::Host(host, _) => !Addr::is_local_name(host),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_announced_as_the_reachable_ones() {
        type Texts = &'static [&'static str];
        let cases: [(&str, Option<&str>, Texts, Texts); 11] = [
            ("tcp:[::]:7", Some("10.0.0.5"), &[], &["tcp:10.0.0.5:7"]),
            ("tcp:[::]:7", Some("fd00::5"), &["10.0.0.5", "fd00::5"], &["tcp:[fd00::5]:7", "tcp:10.0.0.5:7"]),
            ("tcp:[::]:7", Some("127.0.0.1"), &[], &["tcp:127.0.0.1:7"]),
            ("tcp:[::]:7", Some("127.0.0.1"), &["10.0.0.5"], &["tcp:127.0.0.1:7", "tcp:10.0.0.5:7"]),
            ("tcp:[::]:7", None, &["::1"], &["tcp:127.0.0.1:7"]),
            ("tcp:0.0.0.0:7", Some("10.0.0.5"), &["fd00::5"], &["tcp:10.0.0.5:7"]),
            ("tcp:0.0.0.0:7", Some("fd00::5"), &["10.0.0.5"], &["tcp:10.0.0.5:7"]),
            ("tcp:0.0.0.0:7", Some("fd00::5"), &["fd00::6"], &[]),
            ("tcp:10.9.9.9:7", Some("10.0.0.5"), &["10.0.0.5"], &["tcp:10.9.9.9:7"]),
            ("tcp:s1.example:7", Some("10.0.0.5"), &["10.0.0.5"], &["tcp:s1.example:7"]),
            ("unix:/s", Some("10.0.0.5"), &[], &["unix:/s"]),
        ];
        for (listens, here, own, expected) in cases {
            let listens: Addr = listens.parse().unwrap();
            let own: Vec<IpAddr> = own.iter().map(|ip| ip.parse().unwrap()).collect();
            let found = announced(&listens, here.map(|h| h.parse().unwrap()), &own);
            let found: Vec<String> = found.unwrap_or_default().iter().map(Addr::to_string).collect();
            assert_eq!(found, expected, "{listens} from {here:?}");
        }
        assert!(check_announced("n", "tcp:[::]:7").unwrap_err().to_string().contains("--listen"));
        assert!(
            check_announced("n", "tcp:10.0.0.5:0").is_err() && check_announced("n", "tcp:10.0.0.5:7").is_ok()
        );
    }

    #[test]
    fn another_host_tries_no_address_that_leads_to_itself() {
        let all = [
            "tcp:127.0.0.1:1",
            "tcp:10.0.0.5:1",
            "tcp:[::ffff:127.0.0.1]:1",
            "tcp:localhost:1",
            "tcp:s1.example:1",
            "unix:/s",
            "nonsense",
        ]
        .map(String::from);
        let tried = |same| addrs_in_order(&all, same).iter().map(Addr::to_string).collect::<Vec<_>>();
        assert_eq!(tried(false), ["tcp:10.0.0.5:1", "tcp:s1.example:1"]);
        assert_eq!(tried(true).len(), 6);
        assert_eq!(tried(true)[0], "unix:/s");
    }
}
