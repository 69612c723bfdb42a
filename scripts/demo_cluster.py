#!/usr/bin/env python3
"""Three machines and a client as network namespaces: detectors write while machines, coordinators and etcd die.

Each machine runs a member of etcd, a coordinator, a copy of the metadata and two targets of ec:4+2, all joined
with tokens. While two detectors write, everything on the machine that leads the metadata is killed, then the
leading coordinator, then a member of etcd; each is started again. All frames are read back and compared.
Needs root, iproute2, util-linux and etcd. It ends with an error only for missing or wrong bytes.
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETWORK = "10.78.0"
CLIENT = 4
PATIENCE_S = 90


class Machines:
    """Processes in namespaces of their own, on a network that nothing outside sees."""

    def __init__(self, weir: Path, top: Path):
        self.weir, self.top = weir, top
        self.holders: list[subprocess.Popen] = []
        self.running: dict[str, subprocess.Popen] = {}
        self.starts: dict[str, tuple[int, list[str]]] = {}

    def make(self) -> None:
        for number in range(CLIENT + 1):
            self.holders.append(self.namespace(f"m{number}"))
        self.within(0, "ip link add lan type bridge && ip link set lan up")
        for number in range(1, CLIENT + 1):
            pid = self.holders[number].pid
            self.within(0, f"ip link add m{number} type veth peer name eth0 netns {pid}; ip link set m{number} master lan up")
            self.within(number, f"ip link set lo up; ip addr add {NETWORK}.{number}/24 dev eth0; ip link set eth0 up")

    @staticmethod
    def namespace(name: str) -> subprocess.Popen:
        script = f"hostname {name} && echo made && exec sleep 3600"
        holder = subprocess.Popen(["unshare", "-n", "-u", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        if holder.stdout.readline() != "made\n":
            raise RuntimeError("a network namespace cannot be made: run this as root")
        return holder

    def enter(self, machine: int) -> list[str]:
        return ["nsenter", "-t", str(self.holders[machine].pid), "-n", "-u"]

    def within(self, machine: int, script: str) -> None:
        subprocess.run([*self.enter(machine), "sh", "-euc", script], check=True)

    def run(self, machine: int, *args: str) -> str:
        """What a command prints that succeeds."""
        done = subprocess.run([*self.enter(machine), str(self.weir), *args], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"weir {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def start(self, machine: int, name: str, command: list[str]) -> None:
        """Does not wait: the order in which servers start does not matter."""
        self.starts[name] = (machine, command)
        with open(self.top / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [*self.enter(machine), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def start_again(self, name: str) -> None:
        machine, command = self.starts[name]
        self.start(machine, name, [word for word in command if word != "--new"])

    def on(self, machine: int) -> list[str]:
        return [name for name in self.running if self.starts[name][0] == machine]

    def end(self) -> None:
        subprocess.run([*self.enter(CLIENT), str(self.weir), "unmount", "--lazy", str(self.top / "mnt")], capture_output=True)
        for process in [*reversed(self.running.values()), *self.holders]:
            process.kill()
            process.wait()


def wait(what: str, found, machines: Machines):
    """The first answer of `found` that is not empty."""
    until, last = time.monotonic() + PATIENCE_S, None
    while time.monotonic() < until:
        try:
            answer = found()
            if answer:
                return answer
        except (RuntimeError, OSError, ValueError) as error:
            last = error
        time.sleep(0.1)
    logs = "".join(f"--- {log.name}\n{log.read_text()[-600:]}\n" for log in sorted(machines.top.glob("*.log")))
    raise RuntimeError(f"{what}: not after {PATIENCE_S} s; {last}\n{logs}")


class Cluster:
    def __init__(self, machines: Machines):
        self.machines, self.top = machines, machines.top

    def found(self) -> None:
        step("etcd and a coordinator on each machine")
        peers = ",".join(f"e{n}=http://{NETWORK}.{n}:2380" for n in (1, 2, 3))
        clients = ",".join(f"http://{NETWORK}.{n}:2379" for n in (1, 2, 3))
        coordinators = [f"tcp:{NETWORK}.{n}:7000" for n in (1, 2, 3)]
        for n in (1, 2, 3):
            here, etcd = f"http://{NETWORK}.{n}", self.top / f"etcd-{n}"
            self.machines.start(n, f"etcd-{n}", [
                "etcd", "--name", f"e{n}", "--data-dir", str(etcd), "--listen-client-urls", f"{here}:2379",
                "--advertise-client-urls", f"{here}:2379", "--listen-peer-urls", f"{here}:2380",
                "--initial-advertise-peer-urls", f"{here}:2380", "--initial-cluster", peers, "--heartbeat-interval", "50",
                "--election-timeout", "500"])
        for n in (1, 2, 3):
            others = [word for at in coordinators if at != coordinators[n - 1] for word in ("--other", at)]
            init = ["init", "--dir", str(self.top / f"coord-{n}"), "--name", f"coord-{n}", "--store", f"etcd:{clients}",
                    "--listen", coordinators[n - 1], *others, "--targets", "6", "--scheme", "ec:4+2"]
            wait("etcd answers", lambda: self.machines.run(n, *init), self.machines)
            config = self.top / f"coord-{n}" / "coord.toml"
            self.machines.start(n, f"coord-{n}", [str(self.machines.weir), "coord", "--config", str(config)])
        self.leading_coordinator()

    def leading_coordinator(self) -> int:
        """The others do not listen."""
        def leads():
            for n in (1, 2, 3):
                if f"coord-{n}" in self.machines.running:
                    try:
                        self.machines.run(n, "namespace", "list", "--coordinator", f"unix:{self.top}/coord-{n}/socket/coord.sock")
                        return n
                    except RuntimeError:
                        continue
            return None
        return wait("a coordinator leads", leads, self.machines)

    def ask(self, *args: str) -> str:
        n = self.leading_coordinator()
        return self.machines.run(n, *args, "--coordinator", f"unix:{self.top}/coord-{n}/socket/coord.sock")

    def join(self, machine: int, name: str, role: str, *more: str, new: bool = False) -> None:
        token = self.ask("token", "create", "--role", role).strip()
        self.machines.run(machine, "join", token, "--dir", str(self.top / name), "--name", name, *more)
        config = ["--config", str(self.top / name / f"{role}.toml")]
        self.machines.start(machine, name, [str(self.machines.weir), role, *config, *(["--new"] if new else [])])

    def grow(self) -> None:
        step("metadata and two targets on each machine, joined with tokens")
        self.join(1, "meta-1", "meta", new=True)
        wait("the namespace is founded", lambda: self.copies("leads"), self.machines)
        for n in (1, 2, 3):
            if n > 1:
                self.join(n, f"meta-{n}", "meta")
            for target in (2 * n - 1, 2 * n):
                self.join(n, f"s{target}", "storage")
        self.ask("namespace", "copies", "root", "3")
        print(self.ask("namespace", "list"), end="")
        self.ask("access", "add", "admins", "--who", "client", "--root", "keep")

    def mount(self) -> Path:
        path = self.top / "mnt"
        path.mkdir()
        self.join(CLIENT, "client", "mount", "--mount", str(path), "--socket", str(self.top / "users.sock"))
        wait("the file system is mounted", lambda: os.path.ismount(path), self.machines)
        return path

    def copies(self, state: str) -> list[str]:
        listed = json.loads(self.ask("namespace", "list", "--json"))
        return [copy["node"] for entry in listed for copy in entry["copies"] if copy["state"] == state]

    def whole(self) -> bool:
        listed = len(self.copies("current")) == 2
        n = self.leading_coordinator()
        # Its exit code says how things are, so it is no error here.
        status = subprocess.run(
            [*self.machines.enter(n), str(self.machines.weir), "status", "--json",
             "--coordinator", f"unix:{self.top}/coord-{n}/socket/coord.sock"], capture_output=True, text=True)
        return listed and json.loads(status.stdout)["redundant"]


def step(what: str) -> None:
    print(f"\n=== {what}", flush=True)


def lose(cluster: Cluster, what: str, names: list[str]) -> None:
    """Kills processes, and starts them again when the others have gone on."""
    step(f"{what}: {', '.join(names)} killed")
    begun = time.monotonic()
    for name in names:
        cluster.machines.kill(name)
    leader = wait("a node leads the metadata", lambda: [n for n in cluster.copies("leads") if n not in names], cluster.machines)
    print(f"the map can be read and {leader[0]} leads the metadata after {time.monotonic() - begun:.1f} s")
    for name in names:
        cluster.machines.start_again(name)
    wait("everything is redundant again", cluster.whole, cluster.machines)
    print(f"everything is redundant again after {time.monotonic() - begun:.1f} s")


def play(cluster: Cluster, hz: float, duration: int) -> int:
    path = cluster.mount()
    step(f"two detectors write {hz:g} frames of 6.25 MB a second each for {duration} s")
    bench = cluster.machines.weir.with_name("weir-bench")
    command = [*cluster.machines.enter(CLIENT), str(bench), "detector", str(path), "--hz", str(hz),
               "--duration", str(duration), "--runs", "1"]
    detectors = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    time.sleep(duration / 8)
    leader = cluster.copies("leads")[0]
    machine = cluster.machines.starts[leader][0]
    lose(cluster, f"machine {machine}, which leads the metadata", cluster.machines.on(machine))
    lose(cluster, "the leading coordinator", [f"coord-{cluster.leading_coordinator()}"])
    lose(cluster, "a member of etcd", ["etcd-2"])
    step("the detectors end, and their frames are read back and compared")
    said = detectors.communicate()[0]
    if detectors.returncode:
        print(f"the detectors ended with {detectors.returncode}: bytes are missing or wrong", file=sys.stderr)
        return 1
    print(said)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weir", type=Path, help="the program; weir-bench is beside it")
    parser.add_argument("--hz", type=float, default=4, help="frames a second of each of two detectors")
    parser.add_argument("--duration", type=int, default=60, help="seconds for which they write")
    args = parser.parse_args()
    for program in ("etcd", "ip", "nsenter", "unshare"):
        if not shutil.which(program):
            print(f"error: {program} is not installed; hint: apt install etcd-server iproute2 util-linux", file=sys.stderr)
            return 2
    if os.geteuid():
        print("error: only root makes network namespaces; hint: sudo make demo-cluster", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="weir-demo-") as top:
        os.chmod(top, 0o755)
        machines = Machines(args.weir.resolve(), Path(top))
        try:
            machines.make()
            cluster = Cluster(machines)
            cluster.found()
            cluster.grow()
            return play(cluster, args.hz, args.duration)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            machines.end()


if __name__ == "__main__":
    sys.exit(main())
