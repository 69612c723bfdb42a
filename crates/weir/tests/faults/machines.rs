//! Faults between machines: networks, clocks and certificates.
use crate::Program;
use crate::common::machines::Machines;
use crate::common::{left_out, text, wait_until};
use crate::table::{Administered, PATIENCE, Table, slow};
use serde_json::Value;
use std::process::Command;
use std::time::Instant;

const DAY_S: i64 = 86_400;

/// A program that writes to the mount all the time.
fn load(machines: &Machines) -> Program {
    let dir = machines.path("mnt");
    Program::start(&format!("while :; do dd if=/dev/zero of={dir}/load bs=1M count=8 conv=fsync; done"))
}

#[test]
fn networks_that_are_cut_or_slow_are_named() {
    let Some(machines) = Machines::cluster() else { return };
    let mut table = Table::default();
    table.heal(&machines);
    machines.within(0, "ip link set m3 down");
    table.check(&machines, "network of a node cut", slow("storage-down", 1, &["s3 is down"]));
    machines.within(0, "ip link set m3 up");
    table.heal(&machines);

    // The coordinator reaches both of them.
    machines.within(4, "ip route add blackhole 10.77.0.3/32");
    let writer = load(&machines);
    table.check(
        &machines,
        "network between a mount and a node cut",
        slow("link-cut", 1, &["n4:", "has not reached t3 (s3)"]),
    );
    machines.within(4, "ip route del blackhole 10.77.0.3/32");
    drop(writer);
    table.heal(&machines);

    // Another node passes the mount's bytes on to the leader: programs continue while the cut lasts.
    let write = |name: &str| {
        let file = machines.mount().join(name);
        let script = format!("echo a > {0} && sync {0}", file.display());
        Command::new("timeout").args(["60", "sh", "-c", &script]).status().unwrap()
    };
    machines.within(4, "ip route add blackhole 10.77.0.1/32");
    let began = Instant::now();
    assert!(write("first").success(), "the leader is not reached through another node");
    eprintln!("the first file took {:?}", began.elapsed());
    assert!(write("second").success());
    machines.within(4, "ip route del blackhole 10.77.0.1/32");
    assert!(write("third").success());
    table.heal(&machines);

    // 2 Mbit/s, and what does not fit into a short queue is lost.
    machines.within(3, "tc qdisc add dev eth0 root tbf rate 2mbit burst 3000 limit 6000");
    machines.within(0, "tc qdisc add dev m3 root tbf rate 2mbit burst 3000 limit 6000");
    let writer = load(&machines);
    table.check(&machines, "network of a node slow and lossy", slow("", 1, &["s3"]));
    drop(writer);
    machines.within(3, "tc qdisc del dev eth0 root");
    machines.within(0, "tc qdisc del dev m3 root");
    table.heal(&machines);
    table.finish("networks");
}

/// Whether `weir status` has this trouble of a node, and of no other one.
fn is_alone(machines: &Machines, code: &str, about: &str) -> bool {
    let status: Value =
        serde_json::from_slice(&machines.administer(&["status", "--json"]).stdout).unwrap_or_default();
    let troubles = status["troubles"].as_array().cloned().unwrap_or_default();
    let found: Vec<Value> = troubles.into_iter().filter(|trouble| trouble["code"] == code).collect();
    found.len() == 1 && found[0]["about"] == about
}

/// All roles but that of s3 run, with the present clock.
fn restart_all_but_s3(machines: &mut Machines) {
    let running: Vec<String> = machines.running.iter().map(|(name, _)| name.clone()).collect();
    machines.done(4, &["unmount", "--lazy", &machines.path("mnt")]);
    running.iter().rev().for_each(|name| machines.kill(name));
    let config = format!("{}/coord.toml", machines.path("coord"));
    machines.start(1, "coord-role", &["coord", "--config", &config]);
    for (machine, name, role) in
        [(1, "meta1", "meta"), (1, "s1", "storage"), (2, "s2", "storage"), (4, "n4", "mount")]
    {
        machines.restart(machine, name, role);
    }
}

#[test]
fn wrong_clocks_and_old_certificates_are_named() {
    if !cfg!(debug_assertions) {
        left_out("programs of release builds have the clock of the machine");
        return;
    }
    let Some(mut machines) = Machines::cluster() else { return };
    let mut table = Table::default();
    table.heal(&machines);
    machines.kill("s2");
    machines.clock_ahead_s = 600;
    machines.restart(2, "s2", "storage");
    machines.clock_ahead_s = 0;
    let words = ["s2: its machine's clock is ", " s ahead of the coordinator's"];
    table.check(&machines, "clock of a node wrong", slow("clock-off", 1, &words));
    machines.kill("s2");
    machines.restart(2, "s2", "storage");
    table.heal(&machines);

    // A certificate is valid for 30 days, and renewed when ten of these are left. That of s3 cannot be.
    machines.kill("s3");
    machines.clock_ahead_s = 24 * DAY_S;
    restart_all_but_s3(&mut machines);
    let words = ["the certificate of s3 ends in ", "was not renewed"];
    table.check(&machines, "certificate of a node ends soon", slow("certificate-ends", 1, &words));
    wait_until("the others are renewed", PATIENCE, || is_alone(&machines, "certificate-ends", "s3"));
    machines.clock_ahead_s = 31 * DAY_S;
    restart_all_but_s3(&mut machines);
    let words = ["the certificate of s3 ended "];
    table.check(&machines, "certificate of a node has ended", slow("certificate-ended", 1, &words));
    let config = format!("{}/storage.toml", machines.path("s3"));
    let (code, printed) = machines.refused(3, &["storage", "--config", &config]);
    assert!(
        code == 5 && printed.contains("s3 has expired on") && printed.contains("join"),
        "{code}: {printed}"
    );

    // That of another cluster.
    let other = machines.path("other");
    machines.done(5, &["init", "--dir", &other, "--listen", "tcp:10.77.0.5:7000", "--targets", "1"]);
    let admin = format!("{other}/admin.pem");
    let asked = ["status", "--coordinator", "tcp:10.77.0.1:7000", "--certificate", &admin];
    let printed = machines.weir(5, &asked);
    assert_eq!(printed.status.code(), Some(5));
    assert!(text(&printed.stderr).contains("authority"), "{}", text(&printed.stderr));
    table.finish("clocks and certificates");
}
