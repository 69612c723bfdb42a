//! Resolves host names to their present addresses.
//!
//! A name is resolved for each dial: its host may have moved. A name that cannot be resolved in time, because
//! the name service is down, does not prevent dials to the other addresses.
use std::time::Duration;
use tokio::sync::mpsc;
use weir_env::{Addr, Env};
use weir_proto::{Error, Result};

/// For all names in parallel.
const LOOK_UP_PATIENCE: Duration = Duration::from_secs(2);

/// In their order, without duplicates. An error: there are only names, and none of them resolves.
pub async fn resolved(env: &Env, addrs: &[Addr]) -> Result<Vec<Addr>> {
    if !addrs.iter().any(|addr| matches!(addr, Addr::Host(..))) {
        return Ok(addrs.to_vec());
    }
    let (report, mut reported) = mpsc::channel(addrs.len());
    for (n, addr) in addrs.iter().enumerate() {
        let (env_, addr, report) = (env.clone(), addr.clone(), report.clone());
        env.tasks.spawn("look up a name", async move {
            let found = look_up(&env_, &addr).await;
            let _ = report.send((n, found)).await; // too late
        });
    }
    drop(report);
    let mut found: Vec<Option<Result<Vec<Addr>>>> = addrs.iter().map(|_| None).collect();
    let collect = async {
        while let Some((n, addrs)) = reported.recv().await {
            found[n] = Some(addrs);
        }
    };
    let _ = env.clock.timeout(LOOK_UP_PATIENCE, collect).await; // the results so far are used
    let late = |addr: &Addr| Error::unavailable(format!("look up the name in {addr}: no answer"));
    let (mut all, mut failed) = (Vec::new(), None);
    for (addr, found) in addrs.iter().zip(found) {
        match found.unwrap_or_else(|| Err(late(addr))) {
            Ok(found) => found.into_iter().for_each(|addr| {
                if !all.contains(&addr) {
                    all.push(addr);
                }
            }),
            Err(e) => failed = Some(e),
        }
    }
    match failed {
        Some(e) if all.is_empty() => Err(e),
        _ => Ok(all),
    }
}

async fn look_up(env: &Env, addr: &Addr) -> Result<Vec<Addr>> {
    let Addr::Host(host, port) = addr else { return Ok(vec![addr.clone()]) };
    match env.net.resolve(host, *port).await {
        Ok(found) if found.is_empty() => {
            Err(Error::unavailable(format!("look up the name in {addr}: it has no address")))
        }
        Ok(found) => Ok(found.into_iter().map(Addr::Tcp).collect()),
        Err(e) => Err(Error::unavailable(format!("look up the name in {addr}: {e}"))),
    }
}

/// The addresses on which a node named `addr` listens: all addresses of the name on this machine.
pub async fn own_addresses(env: &Env, addr: &Addr) -> Result<Vec<Addr>> {
    let found = look_up(env, addr).await?;
    let Addr::Host(host, _) = addr else { return Ok(found) };
    let is_own = |addr: &Addr| matches!(addr, Addr::Tcp(at) if at.ip().to_canonical().is_loopback());
    if !Addr::is_local_name(host) && found.iter().all(is_own) {
        let at: Vec<String> = found.iter().map(Addr::to_string).collect();
        return Err(Error::invalid(format!(
            "{addr} is {} here, where other machines cannot reach this one",
            at.join(", ")
        ))
        .hint(format!("give {host:?} an address of the network in /etc/hosts, or listen at tcp:[::]:PORT")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> Addr {
        text.parse().unwrap()
    }

    #[tokio::test]
    async fn names_become_addresses_and_unknown_ones_are_passed_over() {
        let env = weir_env::real::env();
        let found =
            resolved(&env, &[addr("tcp:no-such-host.invalid:7"), addr("tcp:10.0.0.1:7")]).await.unwrap();
        assert_eq!(found, [addr("tcp:10.0.0.1:7")]);
        let found = resolved(&env, &[addr("tcp:localhost:7"), addr("tcp:127.0.0.1:7")]).await.unwrap();
        assert!(found.contains(&addr("tcp:127.0.0.1:7")), "{found:?}");
        assert_eq!(found.iter().filter(|a| **a == addr("tcp:127.0.0.1:7")).count(), 1);
        let none = resolved(&env, &[addr("tcp:no-such-host.invalid:7")]).await.unwrap_err();
        assert!(none.context.contains("look up the name in tcp:no-such-host.invalid:7"), "{none:?}");
        assert!(!own_addresses(&env, &addr("tcp:localhost:7")).await.unwrap().is_empty());
    }
}
