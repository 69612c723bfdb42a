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
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benching import MB, Cluster, Writer, fill, machine, raw_rate, spread

FRAMES_KEPT = 400
PATIENCE_S = 1800


def rebuild(cluster: Cluster) -> tuple[float, int, list[tuple[float, float]]]:
    """Seconds until all is redundant again, bytes that were rebuilt, and the times foretold on the way."""
    begun, foretold, copied = time.monotonic(), [], {}
    while True:
        now = cluster.json("rebuild")
        for filled in now["filled"]:
            copied[filled["target"]] = max(copied.get(filled["target"], 0), filled["bytes"])
        left = now["rebuild_left"]["seconds"]
        if left is not None:
            foretold.append((time.monotonic() - begun, left))
        if now["done"]:
            return time.monotonic() - begun, sum(copied.values()), foretold
        if time.monotonic() - begun > PATIENCE_S:
            raise RuntimeError(f"not whole after {PATIENCE_S} s: {now}")
        time.sleep(0.1)


def give_up(cluster: Cluster) -> None:
    """As soon as the coordinator knows that the target is down."""
    until = time.monotonic() + 30
    while True:
        try:
            cluster.run("target", "gone", "t1", "--yes")
            return
        except RuntimeError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def measure(program: Path, args: argparse.Namespace, top: Path, raw: float) -> dict[str, float]:
    cluster = Cluster(program, top)
    cluster.up(7)
    writer = Writer(cluster.mount, args.rate, FRAMES_KEPT)
    try:
        fill(cluster.mount, args.megabytes * MB)
        writer.start()
        time.sleep(3)
        alone = time.monotonic()
        time.sleep(args.alone)
        killed = time.monotonic()
        lost = cluster.used()["t1"][0]
        os.kill(cluster.pid("storage-1"), 9)
        shutil.rmtree(cluster.dir / "t1")
        give_up(cluster)
        # Frames that met the dead node before that are not the rebuild's.
        begun = time.monotonic()
        took, _, foretold = rebuild(cluster)
        end = time.monotonic()
        time.sleep(2)
        writer.end()
        return report(writer, raw, lost, took, foretold, (alone, killed, begun, end))
    finally:
        writer.stops = True
        cluster.down()


def report(writer: Writer, raw: float, lost: int, took: float, foretold: list[tuple[float, float]],
           times: tuple[float, float, float, float]) -> dict[str, float]:
    alone, killed, begun, end = times
    least = lost / MB / (0.6 * raw)
    print(f"t1 had {lost / MB:.0f} MB, rebuilt in {took:.1f} s ({lost / MB / took:.0f} MB/s): "
          f"{took / least:.2f} x the time that 0.6 of the disk's rate takes")
    before, during = writer.between(alone, killed), writer.between(begun, end)
    for name, (rate, median, p99) in (("before", before), ("meanwhile", during)):
        print(f"frames {name}: {rate:.1f} MB/s, p50 {median * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms")
    ratios = {"time": took / least}
    if before[0] and before[2]:
        ratios |= {"rate": during[0] / before[0], "p99": during[2] / before[2]}
        print(f"meanwhile / before: rate {ratios['rate']:.2f}, p99 {ratios['p99']:.2f}")
    early = [(at, left) for at, left in foretold if at >= took / 10]
    for at, left in early[:1]:
        ratios["foretold"] = left / (took - at)
        print(f"foretold after {at:.1f} s: {left:.0f} s more; it took {took - at:.1f} s")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weir", type=Path, help="the program")
    parser.add_argument("--megabytes", type=int, default=4000, help="bytes in files, in MB (default 4000)")
    parser.add_argument("--rate", type=float, default=0, help="frames of 2 MB a second (default: as many as can be)")
    parser.add_argument("--alone", type=float, default=15, help="seconds of writing before the loss (default 15)")
    parser.add_argument("--runs", type=int, default=1, help="runs (default 1); the medians are printed at the end")
    args = parser.parse_args()
    program = args.weir.resolve()
    print(machine(program))
    runs = []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory(prefix="weir-rebuild-") as top:
            try:
                runs.append(measure(program, args, Path(top), raw_rate(Path(top))))
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    if len(runs) > 1:
        for name in runs[0]:
            print(f"{name}: {spread([run[name] for run in runs if name in run])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
