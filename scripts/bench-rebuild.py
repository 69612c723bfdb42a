#!/usr/bin/env python3
"""How fast a lost target is made good, and what writers feel of it: 7 targets, files with 4+2.

Files are written; then one program writes frames and syncs each, alone for a while (`--idle`: nobody writes). One
storage node is killed, its target's directory removed and given up. Prints the machine, the kernel and the
version, what the disk writes by itself, then time and rate of the rebuild, what writers reached before and
meanwhile, and how true the time was that `weir rebuild` foretold after a tenth, a quarter and half of it. All
targets are on one disk: the bytes that all of them wrote count against its one rate. Ends with an error if a
frame is wrong afterwards.
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
# The parts of the rebuild after which the foretold time is compared.
DATA_CELLS = 4
FORETOLD_AT = (0.1, 0.25, 0.5)


def rebuild(cluster: Cluster, verbose: bool) -> tuple[float, list[tuple[float, float]]]:
    """Seconds until all is redundant again, and the times foretold on the way."""
    begun, foretold = time.monotonic(), []
    while True:
        now = cluster.json("rebuild")
        at, left = time.monotonic() - begun, now["rebuild_left"]
        if left["seconds"] is not None:
            foretold.append((at, left["seconds"]))
        if verbose:
            print(f"  {at:.1f} s: {left['bytes'] / MB:.0f} MB left, {left['bytes_per_s'] / MB:.0f} MB/s, "
                  f"{left['seconds']} s; groups by spare members {now['groups_by_spare']}")
        if now["done"]:
            return time.monotonic() - begun, foretold
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
    writer = None if args.idle else Writer(cluster.mount, args.rate, FRAMES_KEPT)
    try:
        fill(cluster.mount, args.megabytes * MB)
        if writer:
            writer.start()
        time.sleep(3)
        alone = time.monotonic()
        time.sleep(args.alone)
        killed = time.monotonic()
        before = cluster.used()
        lost, others = before["t1"][0], others_used(before)
        os.kill(cluster.pid("storage-1"), 9)
        shutil.rmtree(cluster.dir / "t1")
        give_up(cluster)
        # Frames that met the dead node before that are not the rebuild's.
        begun, maps, cpu = time.monotonic(), cluster.status()["map_version"], cluster.cpu_seconds("storage-[2-7]")
        took, foretold = rebuild(cluster, args.verbose)
        end, maps = time.monotonic(), cluster.status()["map_version"] - maps
        cpu = cluster.cpu_seconds("storage-[2-7]") - cpu
        time.sleep(2)
        if writer:
            writer.end()
        print(f"t1 had {lost / MB:.0f} MB, the others got {(others_used(cluster.used()) - others) / MB:.0f} MB and "
              f"the cluster map {maps} changes; the storage processes took {cpu:.1f} s of a processor")
        ratios = report(raw, lost, took, foretold)
        return ratios | (compare(writer, (alone, killed, begun, end)) if writer else {})
    finally:
        if writer:
            writer.stops = True
        cluster.down()


def others_used(used: dict[str, tuple[int, int]]) -> int:
    return sum(bytes_used for name, (bytes_used, _) in used.items() if name != "t1")


def report(raw: float, lost: int, took: float, foretold: list[tuple[float, float]]) -> dict[str, float]:
    least = lost / MB / (0.6 * raw)
    print(f"{lost / MB:.0f} MB were rebuilt in {took:.1f} s ({lost / MB / took:.0f} MB/s by all targets of this one disk): "
          f"{took / least:.2f} x the time that 0.6 of its rate takes")
    # Each byte is decoded from as many others as a stripe has data cells, and all of these are on the one disk, too.
    traffic = (DATA_CELLS + 1) * least
    print(f"with the {DATA_CELLS} bytes that each one is decoded from, read from the same disk: {took / traffic:.2f} x")
    ratios = {"time": took / least, "time_with_reads": took / traffic}
    for part in FORETOLD_AT:
        for at, left in [(at, left) for at, left in foretold if part * took <= at < took][:1]:
            ratios[f"foretold at {part:.0%}"] = left / (took - at)
            print(f"foretold after {at:.1f} s: {left:.0f} s more; it took {took - at:.1f} s: {left / (took - at):.2f} x")
    return ratios


def compare(writer: Writer, times: tuple[float, float, float, float]) -> dict[str, float]:
    alone, killed, begun, end = times
    before, during = writer.between(alone, killed), writer.between(begun, end)
    for name, (rate, median, p99) in (("before", before), ("meanwhile", during)):
        print(f"frames {name}: {rate:.1f} MB/s, p50 {median * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms")
    if not before[0] or not before[2]:
        return {}
    ratios = {"rate": during[0] / before[0], "p99": during[2] / before[2]}
    print(f"meanwhile / before: rate {ratios['rate']:.2f}, p99 {ratios['p99']:.2f}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weir", type=Path, help="the program")
    parser.add_argument("--megabytes", type=int, default=4000, help="bytes in files, in MB (default 4000)")
    parser.add_argument("--rate", type=float, default=0, help="frames of 2 MB a second (default: as many as can be)")
    parser.add_argument("--idle", action="store_true", help="nobody writes")
    parser.add_argument("--verbose", action="store_true", help="print how far it is, all the time")
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
