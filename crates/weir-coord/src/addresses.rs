//! Addresses as others can use them: what a node announces, and what of it a host may try.
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use weir_env::Addr;
use weir_proto::{Error, Result};

/// The address to announce for one that a node listens on. An unspecified one (`[::]`, `0.0.0.0`) stands for `here`: the address by
/// which this host reaches the coordinator. `None`: it reaches it through a local socket, so both are on one host.
pub fn announced(listens: &Addr, here: Option<IpAddr>) -> Result<Addr> {
    let Addr::Tcp(at) = listens else { return Ok(listens.clone()) };
    if !at.ip().is_unspecified() {
        return Ok(listens.clone());
    }
    let here = here.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    if at.is_ipv4() && here.is_ipv6() {
        return Err(Error::invalid(format!(
            "this node listens on {listens}, but this host reaches the coordinator from {here}: others could not use the address; \
             hint: --listen tcp:ADDRESS:PORT with an address of this host"
        )));
    }
    Ok(Addr::Tcp(SocketAddr::new(here, at.port())))
}

/// Whether another node can do something with an announced address.
pub fn check_announced(node: &str, addr: &str) -> Result<()> {
    let addr: Addr = addr.parse().map_err(|e| Error::invalid(format!("node {node:?}: {e}")))?;
    match addr {
        Addr::Tcp(at) if at.ip().is_unspecified() || at.port() == 0 => Err(Error::invalid(format!(
            "node {node:?} announces {addr}, which no other host can reach; hint: --listen tcp:ADDRESS:PORT with an address of its host"
        ))),
        _ => Ok(()),
    }
}

/// A node's addresses as this host should try them: Unix sockets first on the same host; elsewhere neither these nor loopback
/// addresses, which lead to the host itself. What does not read as an address is left out.
pub fn addrs_in_order(addrs: &[String], same_host: bool) -> Vec<Addr> {
    let mut addrs: Vec<Addr> = addrs.iter().filter_map(|a| a.parse().ok()).collect();
    addrs.retain(|a| same_host || is_for_others(a));
    addrs.sort_by_key(|a| !matches!(a, Addr::Unix(_)));
    addrs
}

/// Not a way to the host itself.
pub fn is_for_others(addr: &Addr) -> bool {
    match addr {
        Addr::Tcp(at) => !at.ip().to_canonical().is_loopback(),
        Addr::Unix(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_announced_as_the_reachable_one() {
        let cases = [
            ("tcp:[::]:7", Some("10.0.0.5"), Some("tcp:10.0.0.5:7")),
            ("tcp:[::]:7", Some("fd00::5"), Some("tcp:[fd00::5]:7")),
            ("tcp:[::]:7", Some("127.0.0.1"), Some("tcp:127.0.0.1:7")),
            ("tcp:[::]:7", None, Some("tcp:127.0.0.1:7")),
            ("tcp:0.0.0.0:7", Some("10.0.0.5"), Some("tcp:10.0.0.5:7")),
            ("tcp:0.0.0.0:7", Some("fd00::5"), None),
            ("tcp:10.9.9.9:7", Some("10.0.0.5"), Some("tcp:10.9.9.9:7")),
            ("unix:/s", Some("10.0.0.5"), Some("unix:/s")),
        ];
        for (listens, here, expected) in cases {
            let listens: Addr = listens.parse().unwrap();
            let found = announced(&listens, here.map(|h| h.parse().unwrap()));
            assert_eq!(found.ok().map(|a| a.to_string()).as_deref(), expected, "{listens} from {here:?}");
        }
        assert!(check_announced("n", "tcp:[::]:7").unwrap_err().context.contains("--listen"));
        assert!(
            check_announced("n", "tcp:10.0.0.5:0").is_err() && check_announced("n", "tcp:10.0.0.5:7").is_ok()
        );
    }

    #[test]
    fn another_host_tries_no_address_that_leads_to_itself() {
        let all = ["tcp:127.0.0.1:1", "tcp:10.0.0.5:1", "tcp:[::ffff:127.0.0.1]:1", "unix:/s", "nonsense"]
            .map(String::from);
        let tried = |same| addrs_in_order(&all, same).iter().map(Addr::to_string).collect::<Vec<_>>();
        assert_eq!(tried(false), ["tcp:10.0.0.5:1"]);
        assert_eq!(tried(true).len(), 4);
        assert_eq!(tried(true)[0], "unix:/s");
    }
}
