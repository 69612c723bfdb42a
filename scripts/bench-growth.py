#!/usr/bin/env python3
"""Growth under writes, on one machine with 4+2: new targets, a drained target, damaged bits.

`grow`: six targets, then six more. How even all twelve get, and how much more was moved than had to be. Each
target has a file system of its own, in a file (needs root). `drain`: one of seven targets leaves; the
redundancy of every placement group is polled meanwhile. `flips`: bits of one cell in 10,000 (20 at least) are
flipped, and a pass of the scrub finds and mends them. Each prints the machine, the kernel and the version, and
ends with an error if bytes are wrong or a promise is broken.
"""
import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from benching import BLOCK_BYTES, FILE_BYTES, MB, Cluster, Writer, fill, machine, raw_rate, spread

PATIENCE_S = 1800
# A writer beside the moves.
RATE, KEPT = 5, 64
# Cells are smaller: two flips with this distance are in two cells. The cells of a stripe have about the same
# place on each target, and only two of them may be damaged.
APART = 8 << 20
STAGGER = APART * 5 // 32
FLIPPED_PART, FLIPPED_MIN = 10_000, 20
CELL_BYTES = 512 << 10
# The scrub reads everything in a week, and begins again after two.
PASS_S = 7 * 86_400


def until(what: str, is_so, pause: float = 0.2) -> float:
    begun = time.monotonic()
    while not is_so():
        if time.monotonic() - begun > PATIENCE_S:
            raise RuntimeError(f"{what}: not after {PATIENCE_S} s")
        time.sleep(pause)
    return time.monotonic() - begun


def meters(cluster: Cluster) -> str:
    """What `/metrics` of a console says."""
    console = subprocess.Popen([str(cluster.program), "console", "--dir", str(cluster.dir), "--listen", "127.0.0.1:0"],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in console.stdout:
            if found := re.search(r"http://\S+/metrics", line):
                with urllib.request.urlopen(found[0], timeout=30) as answer:
                    return answer.read().decode()
        raise RuntimeError("`weir console` ended")
    finally:
        console.terminate()
        console.wait()


def copied_bytes(cluster: Cluster) -> float:
    found = re.findall(r"^weir_store_copied_bytes_total\{.*\} (\S+)$", meters(cluster), re.M)
    return sum(float(value) for value in found)


def own_disks(mounts: ExitStack, top: Path, targets: range, size: int) -> None:
    """A file system for each target's directory, with what is in the directory."""
    for number in targets:
        image, at, before = top / f"t{number}.img", top / "w" / f"t{number}", top / f"t{number}.before"
        at.mkdir(exist_ok=True)
        at.rename(before)
        at.mkdir()
        with open(image, "wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(at)], check=True)
        mounts.callback(subprocess.run, ["umount", "-l", str(at)], check=True)
        (at / "lost+found").rmdir()
        subprocess.run(["cp", "-a", f"{before}/.", str(at)], check=True)


def grow(program: Path, args: argparse.Namespace, top: Path) -> dict[str, float]:
    if os.geteuid() != 0:
        raise RuntimeError("`grow` mounts a file system for each target: only root may")
    with ExitStack() as undo:
        cluster = Cluster(program, top)
        cluster.up(6)
        cluster.down()
        own_disks(undo, top, range(1, 7), args.disk << 20)
        undo.callback(cluster.down)
        cluster.up(6)
        # Of each of the six disks two fifths.
        fill(cluster.mount, int(6 * 0.4 * (args.disk << 20) * 4 / 6))
        old = sum(used for used, _ in cluster.used().values())
        cluster.run("rebuild", "--pause")
        cluster.up(12)
        cluster.down()
        own_disks(undo, top, range(7, 13), args.disk << 20)
        undo.callback(cluster.down)
        cluster.up(12)
        writer = Writer(cluster.mount, RATE, KEPT, fresh=True)
        undo.callback(setattr, writer, "stops", True)
        writer.start()
        time.sleep(3)
        begun = time.monotonic()
        cluster.run("rebuild", "--resume")

        def shares() -> list[float]:
            return [used / capacity for used, capacity in cluster.used().values()]

        def is_even() -> bool:
            now, idle = shares(), not cluster.json("rebuild")["moving"]
            return len(now) == 12 and idle and max(now) - min(now) <= 0.02
        until("the targets are even", is_even)
        took = time.monotonic() - begun
        now, moved = shares(), copied_bytes(cluster)
        mean = statistics.mean(now)
        of_new = sum(used for name, (used, _) in cluster.used().items() if int(name[1:]) > 6)
        part = of_new / sum(used for used, _ in cluster.used().values())
        writer.end()
        check_old(cluster)
        ratios = {"off_mean": max(abs(share - mean) for share in now), "part_of_new": part,
                  "moved": moved / (old / 2), "seconds": took}
        print(f"after {took:.1f} s all are {mean:.1%} full, at most {ratios['off_mean']:.1%} of the capacity off the mean; "
              f"the new ones have {part:.0%} of the bytes")
        print(f"{moved / MB:.0f} MB were copied; half of the {old / MB:.0f} MB before had to be: {ratios['moved']:.2f} x")
        if not 0.45 <= part <= 0.55 or ratios["off_mean"] > 0.02:
            raise RuntimeError("the targets are not even")
        return ratios


def drain(program: Path, args: argparse.Namespace, top: Path) -> dict[str, float]:
    raw = raw_rate(top)
    cluster = Cluster(program, top)
    cluster.up(7)
    writer = Writer(cluster.mount, RATE, KEPT)
    try:
        fill(cluster.mount, args.megabytes * MB)
        writer.start()
        time.sleep(3)
        used = cluster.used()["t1"][0]
        begun, polls, lost = time.monotonic(), 0, []
        cluster.run("target", "drain", "t1")

        def is_drained() -> bool:
            nonlocal polls
            spare = cluster.json("rebuild")["groups_by_spare"]
            polls += 1
            if any(spare[:2]):
                lost.append(spare)
            t1 = next(t for t in cluster.json("target", "list") if t["target"] == "t1")
            return t1["places"] == 0
        until("t1 is drained", is_drained, pause=0.05)
        took = time.monotonic() - begun
        writer.end()
        check_old(cluster)
        least = used / MB / raw
        print(f"t1 had {used / MB:.0f} MB and was drained in {took:.1f} s: {took / least:.2f} x the time that the disk takes "
              f"to write them; {polls} looks, {len(lost)} of them saw a placement group with less than all its members")
        if lost:
            raise RuntimeError(f"redundancy was lost: groups by spare members {lost[:3]}")
        return {"seconds": took, "of_raw": took / least}
    finally:
        writer.stops = True
        cluster.down()


def check_old(cluster: Cluster) -> None:
    """Each old file is one block again and again."""
    for path in cluster.mount.glob("old-*"):
        with open(path, "rb") as file:
            first = file.read(BLOCK_BYTES)
            rest = [file.read(BLOCK_BYTES) for _ in range(FILE_BYTES // BLOCK_BYTES - 1)]
        if len(first) != BLOCK_BYTES or any(block != first for block in rest):
            raise RuntimeError(f"{path.name} has other bytes than were written")


def flip(path: Path, at: int) -> bool:
    """Flips a bit of a block that is in use, on the disk."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        block = file.read(4096)
        if len(block) < 4096 or not any(block):
            return False
        file.seek(at)
        file.write(bytes([block[0] ^ 0x10]) + block[1:])
        os.fsync(file.fileno())
    return True


def flip_some(cluster: Cluster, count: int) -> int:
    places = []
    for slab in cluster.dir.glob("t*/slab*"):
        first = (int(slab.parent.name[1:]) - 1) * STAGGER
        places += [(slab, at) for at in range(first, slab.stat().st_size, APART)]
    random.shuffle(places)
    flipped = 0
    for slab, at in places:
        if flipped == count:
            break
        flipped += flip(slab, at)
    return flipped


def flips(program: Path, args: argparse.Namespace, top: Path) -> dict[str, float]:
    cluster = Cluster(program, top)
    cluster.up(6)
    try:
        fill(cluster.mount, args.megabytes * MB)
        raw_bytes = sum(used for used, _ in cluster.used().values())
        wanted = max(FLIPPED_MIN, raw_bytes // CELL_BYTES // FLIPPED_PART)
        flipped = flip_some(cluster, wanted)
        if flipped < wanted:
            raise RuntimeError(f"{flipped} places to flip a bit, {wanted} are wanted: more megabytes")
        begun, used = time.monotonic(), cluster.cpu_seconds("storage-*")
        cluster.run("target", "scrub", *[f"t{number}" for number in range(1, 7)], "--start")

        def passes() -> list[dict]:
            return [t["last"] for t in cluster.json("target", "scrub") if t.get("last")]
        until("a pass of each target", lambda: len(passes()) == 6)
        took, used = time.monotonic() - begun, cluster.cpu_seconds("storage-*") - used
        found = sum(one["damaged_cells"] for one in passes())

        def is_mended() -> bool:
            targets = cluster.status()["targets"]
            return all(t["damaged_blocks"] == t["repaired_blocks"] for t in targets)
        left = until("all is mended", is_mended)
        check_old(cluster)
        per_byte = used / raw_bytes
        print(f"{flipped} flipped bits, {found} damaged cells found in one pass of {took:.1f} s over {raw_bytes / MB:.0f} MB, "
              f"all mended {left:.1f} s later")
        print(f"the storage processes took {used:.1f} s of a processor: {per_byte * 1e9:.2f} s for a GB. A target of 12 TB "
              f"that is read in a week takes {per_byte * 12e12 / PASS_S:.1%} of one")
        if found != flipped:
            raise RuntimeError(f"{flipped} cells were damaged, {found} were found")
        return {"seconds": took, "cpu_of_12_TB": per_byte * 12e12 / PASS_S}
    finally:
        cluster.down()


def main() -> int:
    modes = {"grow": grow, "drain": drain, "flips": flips}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=modes)
    parser.add_argument("weir", type=Path, help="the program")
    parser.add_argument("--megabytes", type=int, default=700, help="bytes in files, in MB (default 700)")
    parser.add_argument("--disk", type=int, default=256, help="size of each disk of `grow`, in MiB (default 256)")
    parser.add_argument("--runs", type=int, default=1, help="runs (default 1); the medians are printed at the end")
    args = parser.parse_args()
    program = args.weir.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    print(machine(program))
    runs = []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory(prefix="weir-growth-") as top:
            try:
                runs.append(modes[args.mode](program, args, Path(top)))
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    if len(runs) > 1:
        for name in runs[0]:
            print(f"{name}: {spread([run[name] for run in runs])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
