#!/usr/bin/env python3
"""More work than the machine can do, without any fault: nothing may fail, and no live target may leave its groups.

Each load gets a fresh cluster on this machine's disk (six targets, 4+2), beside busy loops:
  files     five files of 30 MB at once, written in random order in blocks of 512 bytes, synced and read back
  programs  three programs that write five such files each
  mounts    64 mounts with 16 writers each: random blocks of 4 KiB, synced now and then, verified on another mount;
            all of Weir runs at the lowest priority, the busy loops, from the first write to the last, at the normal one
  stop      a storage process is stopped for two seconds while a program writes and syncs
Prints what each took, what the logs say, and ends with status 1 if a byte is wrong, a call failed, the epoch of a group
rose, the cluster was ever critical, or it is not idle soon after the load has ended.
"""
import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# After the end of a load: then Weir's processes may use this part of one processor, for heartbeats and rounds.
IDLE_AFTER_S, IDLE_PART = 5.0, 0.15
BLOCK = 512
FILE_BYTES = 30 << 20


class Wrong(Exception):
    """A promise is broken."""


class Cluster:
    """A fresh cluster, its mounts, and what was seen of it."""

    def __init__(self, program: Path, busy: int, nice: int) -> None:
        self.program, self.nice = program, nice
        self.dir = Path(tempfile.mkdtemp(prefix="weir-overload-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        self.mounts = [self.dir / "mnt"]
        self.mounts[0].mkdir()
        self.others: list[subprocess.Popen] = []
        self.busy, self.loops = busy, []
        self.worst, self.ended = "healthy", threading.Event()
        self.run("up", "--mount", str(self.mounts[0]))
        self.epochs = self.group_epochs()
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()

    def load_machine(self) -> None:
        loop = [sys.executable, "-c", "while True: pass"]
        self.loops = [subprocess.Popen(loop) for _ in range(self.busy)]

    def free_machine(self) -> None:
        for loop in self.loops:
            loop.kill()
            loop.wait()
        self.loops = []

    def start(self, *args: str, **how) -> subprocess.Popen:
        return subprocess.Popen(["nice", "-n", str(self.nice), str(self.program), *args], text=True, **how)

    def run(self, *args: str) -> str:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(*args, "--dir", str(self.dir / "cluster"), **pipes) as process:
            out, err = process.communicate()
        if process.returncode and not out:
            raise RuntimeError(f"weir {' '.join(args)}: {err.strip()}")
        return out

    def status(self) -> dict:
        return json.loads(self.run("status", "--json"))

    def group_epochs(self) -> list[int]:
        return [group["epoch"] for group in self.status()["groups"]]

    def watch(self) -> None:
        while not self.ended.wait(2):
            try:
                status = self.status()
            except (RuntimeError, ValueError):
                continue  # the command itself was late
            state = status["state"]
            if state == "critical" and self.worst != "critical":
                print("   ", *(t["text"] for t in status["troubles"] if t["severity"] == "critical"), sep="; ", flush=True)
            self.worst = state if state == "critical" or self.worst == "healthy" else self.worst

    def mount(self, number: int) -> Path:
        """One more mount, in a process of its own."""
        place = self.dir / f"mnt{number}"
        place.mkdir()
        log = open(self.dir / f"mount{number}.log", "w")
        args = ["mount", str(place), "--dir", str(self.dir / "cluster"), "--name", f"m{number}"]
        self.others.append(self.start(*args, stdout=log, stderr=log))
        deadline = time.monotonic() + 300
        while not os.path.ismount(place):
            if time.monotonic() > deadline or self.others[-1].poll() is not None:
                raise RuntimeError(f"mount {number} is not ready: {(self.dir / f'mount{number}.log').read_text()}")
            time.sleep(0.1)
        self.mounts.append(place)
        return place

    def pids(self) -> dict[str, int]:
        found = (self.dir / "cluster" / "run").glob("*.pid")
        return {path.stem: json.loads(path.read_text().splitlines()[-1])["pid"] for path in found}

    def cpu_s(self) -> float:
        """Processor time of all of Weir's processes."""
        ticks = 0
        for pid in [*self.pids().values(), *(process.pid for process in self.others)]:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def check(self) -> str:
        """After the load: idle, and nothing has changed."""
        time.sleep(IDLE_AFTER_S)
        before, begun = self.cpu_s(), time.monotonic()
        time.sleep(2)
        used = (self.cpu_s() - before) / (time.monotonic() - begun)
        self.ended.set()
        self.watcher.join()
        logs = [*(self.dir / "cluster").rglob("*.log"), *self.dir.glob("mount*.log")]
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        count = lambda *words: sum(any(word in line for word in words) for line in lines)
        seen = (f"idle at {used:.2f} of a processor; worst state {self.worst}; logs: {count(' is down')} downs, "
                f"{count('data is lost')} lost, {count(' WARN ')} warnings, {count(' ERROR ')} errors, {len(lines)} lines")
        if self.group_epochs() != self.epochs:
            raise Wrong(f"the epochs of groups have changed; {seen}")
        if self.worst == "critical" or count("data is lost"):
            raise Wrong(seen)
        if used > IDLE_PART * (1 + len(self.others) / 8):
            raise Wrong(f"it is not idle; {seen}")
        return seen

    def end(self, keep: bool) -> None:
        self.ended.set()
        self.free_machine()
        for place, process in zip(self.mounts[1:], self.others):
            subprocess.run(["fusermount3", "-u", str(place)], capture_output=True)
            process.terminate()
        for process in self.others:
            process.wait()
        try:
            self.run("down")
        except RuntimeError as error:
            print(f"    weir down: {error}")
        if keep:
            print(f"    kept: {self.dir}")
        else:
            shutil.rmtree(self.dir, ignore_errors=True)


def write_in_random_order(path: Path, seed: int) -> float:
    """Returns how long the fsync took."""
    count = FILE_BYTES // BLOCK
    order = list(range(count))
    random.Random(seed).shuffle(order)
    content = lambda n: (seed * count + n).to_bytes(8, "little") * (BLOCK // 8)
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    for n in order:
        os.pwrite(file, content(n), n * BLOCK)
    begun = time.monotonic()
    os.fsync(file)
    took = time.monotonic() - begun
    os.close(file)
    data = path.read_bytes()
    wrong = sum(data[n * BLOCK:(n + 1) * BLOCK] != content(n) for n in range(count))
    if wrong:
        raise Wrong(f"{path.name}: {wrong} of {count} blocks are wrong")
    return took


def files(cluster: Cluster, args) -> str:
    cluster.load_machine()
    with ThreadPoolExecutor(5) as pool:
        took = list(pool.map(lambda n: write_in_random_order(cluster.mounts[0] / f"f{n}", n), range(5)))
    return f"fsync {min(took):.2f} to {max(took):.2f} s"


def programs(cluster: Cluster, args) -> str:
    code = "import overload, sys, pathlib\n" \
           "for n in range(5): print(overload.write_in_random_order(pathlib.Path(sys.argv[1] + str(n)), n))"
    where = {"cwd": Path(__file__).parent, "stdout": subprocess.PIPE, "text": True}
    cluster.load_machine()
    begun = time.monotonic()
    running = [subprocess.Popen([sys.executable, "-c", code, str(cluster.mounts[0] / f"p{n}-")], **where)
               for n in range(3)]
    took = [float(line) for process in running for line in process.communicate()[0].split()]
    if any(process.returncode for process in running):
        raise Wrong("a program failed, as it says above")
    return f"{time.monotonic() - begun:.0f} s, fsync {min(took):.2f} to {max(took):.2f} s"


def write_blocks(place: Path, number: int, until: float) -> tuple[list[float], dict[int, bytes]]:
    """Random blocks of 4 KiB of a file of 4 MiB: the times of its syncs, and the last content of each block."""
    dice, last, took = random.Random(number), {}, []
    file = os.open(place / f"w{number}", os.O_CREAT | os.O_WRONLY)
    while time.monotonic() < until or not took:
        for _ in range(32):
            block = dice.randrange(1024)
            last[block] = dice.randbytes(16) * 256
            os.pwrite(file, last[block], block * 4096)
        begun = time.monotonic()
        os.fsync(file)
        took.append(time.monotonic() - begun)
    os.close(file)
    return took, last


def mounts(cluster: Cluster, args) -> str:
    places = [cluster.mount(n) for n in range(args.mounts)]
    count = args.mounts * args.writers
    cluster.load_machine()
    until = time.monotonic() + args.seconds
    with ThreadPoolExecutor(count) as pool:
        writers = [pool.submit(write_blocks, places[n % args.mounts], n, until) for n in range(count)]
        done = [writer.result() for writer in writers]
    cluster.free_machine()
    for n, (_, last) in enumerate(done):
        data = (places[(n + 1) % args.mounts] / f"w{n}").read_bytes()
        if any(data[block * 4096:(block + 1) * 4096] != content for block, content in last.items()):
            raise Wrong(f"file w{n} has other bytes")
    took = sorted(seconds for times, _ in done for seconds in times)
    p99 = took[len(took) * 99 // 100]
    return f"{len(took)} syncs of 32 blocks, p50 {statistics.median(took):.2f} s, p99 {p99:.2f} s, max {took[-1]:.2f} s"


def stop(cluster: Cluster, args) -> str:
    cluster.load_machine()
    slowest = 0.0
    with open(cluster.mounts[0] / "f", "wb") as file:
        for name in sorted(name for name in cluster.pids() if name.startswith("storage"))[:3]:
            pid, begun = cluster.pids()[name], time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(2, os.kill, (pid, signal.SIGCONT)).start()
            while time.monotonic() - begun < 5:
                at = time.monotonic()
                file.write(os.urandom(1 << 20))
                file.flush()
                os.fsync(file.fileno())
                slowest = max(slowest, time.monotonic() - at)
    return f"the slowest write of 1 MiB with its fsync took {slowest:.2f} s"


LOADS = {"files": (files, 0), "programs": (programs, 0), "mounts": (mounts, 19), "stop": (stop, 0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="the weir program")
    parser.add_argument("loads", nargs="*", default=list(LOADS), metavar="LOAD", help=f"of {', '.join(LOADS)}; all")
    parser.add_argument("--busy", type=int, help="busy loops beside it (2; 4 beside mounts)")
    parser.add_argument("--mounts", type=int, default=64)
    parser.add_argument("--writers", type=int, default=16, help="on each mount")
    parser.add_argument("--seconds", type=int, default=300, help="of the load of mounts")
    parser.add_argument("--keep", action="store_true", help="keep directories and logs")
    args = parser.parse_args()
    unknown = [load for load in args.loads if load not in LOADS]
    if unknown:
        parser.error(f"no load {unknown[0]!r}: {', '.join(LOADS)}")
    version = subprocess.run([args.program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{version}, {os.cpu_count()} processors, Linux {platform.release()}")
    failed = 0
    for name in args.loads:
        load, nice = LOADS[name]
        busy = args.busy if args.busy is not None else 4 if name == "mounts" else 2
        cluster = Cluster(args.program.resolve(), busy, nice)
        try:
            print(f"{name}: {load(cluster, args)}; {cluster.check()}", flush=True)
        except (Wrong, OSError, RuntimeError) as error:
            failed += 1
            print(f"{name}: WRONG: {error}", flush=True)
        finally:
            cluster.end(args.keep)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
