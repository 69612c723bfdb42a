#!/usr/bin/env python3
"""How fast a lost target is made good, and what writers feel of it: 7 targets, files with 4+2.

Files are written; then one program writes frames and syncs each, alone for a while. One storage node is killed,
its target's directory removed and given up. Prints the machine, the kernel and the version, what the disk writes
by itself, then time and rate of the rebuild, what writers reached before and meanwhile, and how true the time
was that `weir rebuild` foretold after a tenth of it. Ends with an error if a frame is wrong afterwards.
"""
import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MB = 1_000_000
FRAME_BYTES = 2 * MB
FRAMES_PER_FILE = 16
FRAMES_KEPT = 400
PATIENCE_S = 1800


def weir(program: Path, *args: str) -> str:
    done = subprocess.run([str(program), *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"weir {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def frame(number: int) -> bytes:
    return (b"%015d\n" % number) * (FRAME_BYTES // 16)


class Writer(threading.Thread):
    """Frames one after the other, at most `rate` a second (0: as many as can be)."""

    def __init__(self, top: Path, rate: float):
        super().__init__(daemon=True)
        self.top, self.rate, self.taken, self.error, self.stops = top, rate, [], None, False

    def run(self) -> None:
        number, due = 0, time.monotonic()
        while not self.stops and not self.error:
            data, begun = frame(number), time.monotonic()
            try:
                path = self.top / f"frames-{number // FRAMES_PER_FILE % (FRAMES_KEPT // FRAMES_PER_FILE)}"
                start = number % FRAMES_PER_FILE == 0
                file = os.open(path, os.O_CREAT | os.O_WRONLY | (os.O_TRUNC if start else os.O_APPEND))
                os.write(file, data)
                os.fsync(file)
                os.close(file)
            except OSError as error:
                self.error = error
            now = time.monotonic()
            self.taken.append((now, now - begun))
            number += 1
            if self.rate:
                due = max(due + 1 / self.rate, now - 1)
                time.sleep(max(0.0, due - now))

    def between(self, begin: float, end: float) -> tuple[float, float, float]:
        """MB/s, the median and the slowest in a hundred, in seconds."""
        found = sorted(took for at, took in self.taken if begin <= at < end)
        if not found:
            return 0.0, 0.0, 0.0
        p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
        return len(found) * FRAME_BYTES / MB / (end - begin), statistics.median(found), p99

    def check(self) -> None:
        last = len(self.taken)
        for path in self.top.glob("frames-*"):
            data = path.read_bytes()
            for at in range(0, len(data), FRAME_BYTES):
                number = int(data[at:at + 15])
                if data[at:at + FRAME_BYTES] != frame(number) or number >= last:
                    raise RuntimeError(f"{path.name}: the frame at {at} is wrong")


def raw_write(top: Path, size: int) -> float:
    """MB/s of the disk under the targets."""
    path, block = top / "raw", os.urandom(4 << 20)
    begun = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    took = time.monotonic() - begun
    path.unlink()
    return size / MB / took


def fill(top: Path, size: int) -> None:
    block = os.urandom(4 << 20)
    for number in range(size // (64 << 20)):
        with open(top / f"old-{number}", "wb", buffering=0) as file:
            for _ in range(16):
                file.write(block)
            os.fsync(file.fileno())


def rebuild(program: Path, cluster: Path) -> tuple[float, int, list[tuple[float, float]]]:
    """Seconds until all is redundant again, bytes that were rebuilt, and the times foretold on the way."""
    begun, foretold, copied = time.monotonic(), [], {}
    while True:
        now = json.loads(weir(program, "rebuild", "--json", "--dir", str(cluster)))
        for filled in now["filled"]:
            copied[filled["target"]] = max(copied.get(filled["target"], 0), filled["bytes"])
        left = now["rebuild_left"]["seconds"]
        if left is not None:
            foretold.append((time.monotonic() - begun, left))
        if now["done"]:
            return time.monotonic() - begun, sum(copied.values()), foretold
        if time.monotonic() - begun > PATIENCE_S:
            raise RuntimeError(f"not whole after {PATIENCE_S} s: {now}")
        time.sleep(0.2)


def give_up(program: Path, cluster: Path) -> None:
    """As soon as the coordinator knows that the target is down."""
    until = time.monotonic() + 30
    while True:
        try:
            weir(program, "target", "gone", "t1", "--yes", "--dir", str(cluster))
            return
        except RuntimeError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def measure(program: Path, args: argparse.Namespace, top: Path) -> None:
    size = args.megabytes * MB
    raw = statistics.median(raw_write(top, 512 << 20) for _ in range(3))
    print(f"the disk by itself writes {raw:.0f} MB/s (median of 3)")
    cluster, mount = top / "w", top / "m"
    weir(program, "up", "--dir", str(cluster), "--targets", "7", "--scheme", "ec:4+2", "--mount", str(mount))
    writer = Writer(mount, args.rate)
    try:
        fill(mount, size)
        writer.start()
        time.sleep(3)
        alone = time.monotonic()
        time.sleep(args.alone)
        killed = time.monotonic()
        status = json.loads(weir(program, "status", "--json", "--dir", str(cluster)))
        lost = next(t for t in status["targets"] if t["id"] == 1)["used_bytes"]
        node = cluster / "run" / "storage-1.pid"
        os.kill(json.loads(node.read_text())["pid"], 9)
        shutil.rmtree(cluster / "t1")
        give_up(program, cluster)
        # Frames that met the dead node before that are not the rebuild's.
        begun = time.monotonic()
        took, copied, foretold = rebuild(program, cluster)
        end = time.monotonic()
        time.sleep(2)
        writer.stops = True
        writer.join(60)
        if writer.error:
            raise RuntimeError(f"a frame failed: {writer.error}")
        writer.check()
        report(writer, raw, lost, copied, took, foretold, (alone, killed, begun, end))
    finally:
        writer.stops = True
        subprocess.run([str(program), "down", "--dir", str(cluster)], capture_output=True)


def report(writer: Writer, raw: float, lost: int, copied: int, took: float,
           foretold: list[tuple[float, float]], times: tuple[float, float, float, float]) -> None:
    alone, killed, begun, end = times
    least = lost / MB / (0.6 * raw)
    print(f"t1 had {lost / MB:.0f} MB; {copied / MB:.0f} MB were rebuilt in {took:.1f} s ({copied / MB / took:.0f} MB/s): "
          f"{took / least:.2f} x the time that 0.6 of the disk's rate takes")
    before, during = writer.between(alone, killed), writer.between(begun, end)
    for name, (rate, median, p99) in (("before", before), ("meanwhile", during)):
        print(f"frames {name}: {rate:.1f} MB/s, p50 {median * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms")
    if before[0] and before[2]:
        print(f"meanwhile / before: rate {during[0] / before[0]:.2f}, p99 {during[2] / before[2]:.2f}")
    early = [(at, left) for at, left in foretold if at >= took / 10]
    if early:
        at, left = early[0]
        print(f"foretold after {at:.1f} s: {left:.0f} s more; it took {took - at:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weir", type=Path, help="the program")
    parser.add_argument("--megabytes", type=int, default=4000, help="bytes in files, in MB (default 4000)")
    parser.add_argument("--rate", type=float, default=0, help="frames of 2 MB a second (default: as many as can be)")
    parser.add_argument("--alone", type=float, default=15, help="seconds of writing before the loss (default 15)")
    args = parser.parse_args()
    program = args.weir.resolve()
    print(f"{platform.node()}, {os.cpu_count()} cores, Linux {platform.release()}, {weir(program, '--version').strip()}")
    with tempfile.TemporaryDirectory(prefix="weir-rebuild-") as top:
        try:
            measure(program, args, Path(top))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
