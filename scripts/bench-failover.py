#!/usr/bin/env python3
"""How long the metadata is away when its leader is killed: a cluster with three copies, many times.

One program creates a file, writes 100 bytes and syncs it, again and again, through a mount. For each kill the
longest such step counts. With --client a client that wrote in one volume dies with the leader, and programs work in that
client's directory, in the same volume and in another one. Prints the machine, the kernel and the version, then the median, the 99th percentile
and the longest; ends with an error if a step failed or a file lacks its bytes.
"""
import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def weir(program: Path, *args: str) -> str:
    done = subprocess.run([str(program), *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"weir {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


class Writer(threading.Thread):
    def __init__(self, top: Path):
        super().__init__(daemon=True)
        self.top, self.written, self.longest, self.error, self.stops = top, 0, 0.0, None, False

    def run(self) -> None:
        while not self.stops and not self.error:
            begun = time.monotonic()
            try:
                file = os.open(self.top / f"f{self.written}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.write(file, b"%099d\n" % self.written)
                os.fsync(file)
                os.close(file)
            except OSError as error:
                self.error = error
            self.longest = max(self.longest, time.monotonic() - begun)
            self.written += 1


def copies(program: Path, top: Path) -> dict[str, str]:
    listed = json.loads(weir(program, "namespace", "list", "--json", "--dir", str(top)))
    return {copy["node"]: copy["state"] for copy in listed[0]["copies"]}


def until(found) -> None:
    deadline = time.monotonic() + 60
    while not found():
        if time.monotonic() > deadline:
            raise RuntimeError("the copies are not whole after 60 s")
        time.sleep(0.05)


def pid_of(cluster: Path, role: str) -> int:
    return json.loads((cluster / "run" / f"{role}.pid").read_text().splitlines()[-1])["pid"]


def leading_coordinator(cluster: Path) -> str:
    """Of three, the one that listens."""
    for role in ("coord-1", "coord-2", "coord-3"):
        with socket.socket(socket.AF_UNIX) as door:
            if door.connect_ex(str(cluster / "socket" / f"{role}.sock")) == 0:
                return role
    raise RuntimeError("no coordinator listens")


def measure(program: Path, kills: int, stop: bool, coordinator: bool, top: Path) -> list[float]:
    cluster, mount = top / "w", top / "m"
    etcd = ["--etcd", "3"] if coordinator else []
    weir(program, "up", "--dir", str(cluster), "--copies", "3", "--mount", str(mount), *etcd)
    writer, longest = Writer(mount), []
    try:
        writer.start()
        for _ in range(kills):
            until(lambda: sorted(copies(program, cluster).values()) == ["current", "current", "leads"])
            before = writer.written
            until(lambda: writer.written > before + 20)
            leader = next(node for node, state in copies(program, cluster).items() if state == "leads")
            ended = [leader, leading_coordinator(cluster)] if coordinator else [leader]
            ended = [pid_of(cluster, role) for role in ended]
            # The copies report a leader that they have followed for ten seconds.
            time.sleep(12 if stop else 0)
            writer.longest = 0.0
            for pid in ended:
                os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
            before = writer.written
            until(lambda: writer.written > before + 20)
            longest.append(writer.longest)
            if stop:
                for pid in ended:
                    os.kill(pid, signal.SIGCONT)
            weir(program, "up", "--dir", str(cluster))
        writer.stops = True
        writer.join(60)
        for number in range(writer.written):
            if (mount / f"f{number}").read_bytes() != b"%099d\n" % number:
                raise RuntimeError(f"f{number} lacks its bytes")
        if writer.error:
            raise RuntimeError(f"a step failed: {writer.error}")
        return longest
    finally:
        writer.stops = True
        subprocess.run([str(program), "down", "--dir", str(cluster)], capture_output=True)


def measure_with_client(program: Path, kills: int, top: Path) -> list[float]:
    """The longest steps in another volume than the dead client's; others are printed."""
    cluster, mount, other = top / "w", top / "m", top / "other"
    weir(program, "up", "--dir", str(cluster), "--copies", "3", "--mount", str(mount))
    longest: dict[str, list[float]] = {}
    try:
        for volume in ("used", "free"):
            weir(program, "volume", "create", volume, "--dir", str(cluster))
        other.mkdir()
        for kill in range(kills):
            # In a namespace of its own: the leader cannot see that its process is gone.
            client = subprocess.Popen(["unshare", "-p", "-f", "--kill-child=KILL", str(program), "mount", str(other), "--dir",
                                       str(cluster), "--name", f"other-{kill}"], stderr=subprocess.DEVNULL)
            until(lambda: os.path.ismount(other))
            (other / "used" / f"its{kill}").mkdir()
            held = os.open(other / "used" / f"its{kill}" / "held", os.O_CREAT | os.O_WRONLY)
            os.write(held, bytes(100_000))
            for place in (f"free/d{kill}", f"used/d{kill}"):
                (mount / place).mkdir()
            writers = [Writer(mount / place) for place in (f"free/d{kill}", f"used/d{kill}", f"used/its{kill}")]
            for writer in writers:
                writer.start()
            until(lambda: sorted(copies(program, cluster).values()) == ["current", "current", "leads"])
            until(lambda: all(writer.written > 30 for writer in writers))
            leader = next(node for node, state in copies(program, cluster).items() if state == "leads")
            before = [writer.written for writer in writers]
            for writer in writers:
                writer.longest = 0.0
            client.kill()
            os.kill(pid_of(cluster, leader), signal.SIGKILL)
            until(lambda: all(writer.written > n + 20 or writer.error for writer, n in zip(writers, before)))
            for writer in writers:
                writer.stops = True
                writer.join(60)
                if writer.error:
                    raise RuntimeError(f"a step failed: {writer.error}")
            for where, writer in zip(("free", "used", "its"), writers):
                longest.setdefault(where, []).append(writer.longest)
            client.wait()
            subprocess.run(["umount", "-l", str(other)], capture_output=True)
            weir(program, "up", "--dir", str(cluster))
        for where, what in (("used", "in the volume of the client"), ("its", "in the directory of the client")):
            print(f"{what}: longest step p50 {statistics.median(longest[where]):.2f} s, max {max(longest[where]):.2f} s")
        return longest["free"]
    finally:
        subprocess.run(["umount", "-l", str(other)], capture_output=True)
        subprocess.run([str(program), "down", "--dir", str(cluster)], capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weir", type=Path, help="the program")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stop", action="store_true", help="stop the leader (SIGSTOP) instead: no connection ends")
    parser.add_argument("--coordinator", action="store_true", help="the leading one of three coordinators ends with the leader")
    parser.add_argument("--client", action="store_true", help="kill a client with the leader; the other volume is measured")
    args = parser.parse_args()
    program = args.weir.resolve()
    print(f"{platform.node()}, {os.cpu_count()} cores, Linux {platform.release()}, {weir(program, '--version').strip()}")
    with tempfile.TemporaryDirectory(prefix="weir-failover-") as top:
        try:
            if args.client:
                done = measure_with_client(program, args.kills, Path(top))
            else:
                done = measure(program, args.kills, args.stop, args.coordinator, Path(top))
            found = sorted(done)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    what = "and a client killed" if args.client else "stopped" if args.stop else "killed"
    what = f"and coordinator {what}" if args.coordinator else what
    p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
    print(f"leader {what} {len(found)} times: longest step p50 {statistics.median(found):.2f} s, p99 {p99:.2f} s, "
          f"max {found[-1]:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
