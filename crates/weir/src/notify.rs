//! A role's notifications to systemd: that it serves, its present work, and that it is alive.
//!
//! The protocol is that of sd_notify(3): a datagram of `KEY=VALUE` lines to the socket that NOTIFY_SOCKET
//! names. Without a socket, nothing is sent. A socket that does not answer is logged without further effect:
//! systemd decides what follows.
use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;
use weir_admin::failure::{Failure, Outcome};
use weir_env::Env;
use weir_proto::Error;

/// Signs of life within one period of the watchdog: a late one must not end the role.
const BEATS: u32 = 3;

/// The variables of the environment for this, read by `main`.
#[derive(Clone, Debug, Default)]
pub struct Variables {
    /// `NOTIFY_SOCKET`: a path, or a name in the abstract namespace that begins with '@'.
    pub socket: Option<OsString>,
    /// `WATCHDOG_USEC`: without a sign of life for this number of microseconds systemd ends the process.
    pub watchdog_usec: Option<String>,
    /// `WATCHDOG_PID`: the process that is meant; absent: this one.
    pub watchdog_pid: Option<String>,
}

/// The manager that started this process, if it requested notifications.
#[derive(Clone, Default)]
pub struct Manager {
    socket: Option<Arc<(UnixDatagram, SocketAddr)>>,
    watchdog: Option<Duration>,
}

impl Manager {
    pub fn of(variables: &Variables) -> Outcome<Manager> {
        let Some(name) = variables.socket.as_ref().filter(|name| !name.is_empty()) else {
            return Ok(Manager::default());
        };
        let bad = |variable: &str, value: &str, why: &str| {
            Failure::new(
                Error::invalid(format!("{variable} is {value:?}: {why}")),
                format!(
                    "systemd sets it for units with Type=notify; elsewhere run the command without it: env -u {variable} weir …"
                ),
            )
        };
        let shown = name.to_string_lossy();
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            [b'/', ..] => SocketAddr::from_pathname(name),
            _ => return Err(bad("NOTIFY_SOCKET", &shown, "expected a path, or @ and a name")),
        };
        let address = address.map_err(|e| bad("NOTIFY_SOCKET", &shown, &e.to_string()))?;
        let socket = UnixDatagram::unbound().and_then(|socket| {
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        let socket = socket.map_err(|e| Error::from_io("make a socket to systemd", &e))?;
        let own = std::process::id().to_string();
        let is_ours = variables.watchdog_pid.as_ref().is_none_or(|pid| *pid == own);
        let watchdog = match variables.watchdog_usec.as_ref().filter(|_| is_ours) {
            None => None,
            Some(text) => match text.parse() {
                Ok(0) | Err(_) => {
                    return Err(bad("WATCHDOG_USEC", text, "expected a number of microseconds"));
                }
                Ok(usec) => Some(Duration::from_micros(usec)),
            },
        };
        Ok(Manager { socket: Some(Arc::new((socket, address))), watchdog })
    }

    /// The role serves; `status` describes the service and its addresses.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)));
    }
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", one_line(status)));
    }

    /// Sends signs of life as long as the runtime runs: each needs its timer, and a worker that takes a new
    /// task.
    pub fn keep_alive(&self, env: &Env) {
        let Some(period) = self.watchdog.map(|limit| limit / BEATS) else { return };
        let (manager, env, tasks) = (self.clone(), env.clone(), env.tasks.clone());
        tasks.spawn("watchdog", async move {
            loop {
                let (turned, turns) = tokio::sync::oneshot::channel();
                let turn = async move {
                    let _ = turned.send(());
                };
                env.tasks.spawn("watchdog: a turn", turn);
                if turns.await.is_ok() {
                    manager.send("WATCHDOG=1");
                }
                env.clock.sleep(period).await;
            }
        });
    }

    fn send(&self, lines: &str) {
        let Some(socket) = &self.socket else { return };
        match socket.0.send_to_addr(lines.as_bytes(), &socket.1) {
            Ok(_) => {}
            // The next sign of life is soon enough.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && lines == "WATCHDOG=1" => {}
            Err(e) => {
                tracing::warn!("systemd did not get {:?}: {e}", lines.lines().next().unwrap_or_default())
            }
        }
    }
}

/// A line break would begin another key.
fn one_line(text: &str) -> String {
    text.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    fn variables(socket: &str, usec: &str) -> Variables {
        Variables {
            socket: Some(socket.into()),
            watchdog_usec: Some(usec.into()),
            watchdog_pid: Some(std::process::id().to_string()),
        }
    }
    fn received(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 512];
        let len = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    #[test]
    fn a_role_says_that_it_serves_in_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        let manager = Manager::of(&variables(path.to_str().unwrap(), "1000000")).unwrap();
        manager.ready("serves at a\nREADY=0");
        assert_eq!(received(&systemd), "READY=1\nSTATUS=serves at a; READY=0");
        manager.status("waits");
        assert_eq!(received(&systemd), "STATUS=waits");
        drop(systemd);
        manager.status("systemd is gone: nothing happens");
    }

    #[test]
    fn an_abstract_socket_is_one_too() {
        let name = format!("weir-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let systemd = UnixDatagram::bind_addr(&address).unwrap();
        Manager::of(&variables(&format!("@{name}"), "9")).unwrap().ready("mover");
        assert_eq!(received(&systemd), "READY=1\nSTATUS=mover");
    }

    #[test]
    fn signs_of_life_come_while_the_runtime_turns() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        systemd.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let manager = Manager::of(&variables(path.to_str().unwrap(), "3000")).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            manager.keep_alive(&weir_env::real::env());
            for _ in 0..3 {
                let next = systemd.try_clone().unwrap();
                assert_eq!(tokio::task::spawn_blocking(move || received(&next)).await.unwrap(), "WATCHDOG=1");
            }
        });
        // The runtime has stopped: all sent messages are in the socket.
        systemd.set_nonblocking(true).unwrap();
        while systemd.recv(&mut [0; 64]).is_ok() {}
        assert_eq!(systemd.recv(&mut [0; 64]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn wrong_variables_are_refused_and_others_processes_ignored() {
        let of = |socket: &str, usec: &str| Manager::of(&variables(socket, usec));
        for (socket, usec) in [("relative", "1"), ("/run/x", "soon"), ("/run/x", "0")] {
            assert!(of(socket, usec).is_err(), "{socket} {usec}");
        }
        let other = Variables { watchdog_pid: Some("1".into()), ..variables("/run/x", "5") };
        assert_eq!(Manager::of(&other).unwrap().watchdog, None);
        assert_eq!(of("/run/x", "5").unwrap().watchdog, Some(Duration::from_micros(5)));
        assert!(Manager::of(&Variables::default()).unwrap().socket.is_none());
    }
}
