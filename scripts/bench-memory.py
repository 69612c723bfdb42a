#!/usr/bin/env python3
"""The memory of two mounts with many names: one makes the files, the other one lists and reads all of them.

Prints the machine, the kernel and the version; then, for each mount, what `memory_mib` allows it, its resident memory
before, its largest one, and the one after a minute of rest, each with the share of `memory_mib`. Programs outside the
mounts are not counted. The kernel's own inodes and pages are not the mount's, and are not counted either.
"""
import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benching import Cluster, machine, weir

PER_DIRECTORY = 1000
ALLOWED_MIB = 512  # of a mount that is told nothing


def memory(pid: int) -> tuple[float, float]:
    """Resident now, and at most so far, in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return tuple(int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))


def make(directory: Path, size: int) -> None:
    directory.mkdir()
    for number in range(PER_DIRECTORY):
        (directory / f"file-{number:04}").write_bytes(b"x" * size)


def read(directory: Path) -> int:
    entries = list(os.scandir(directory))
    return sum(entry.stat().st_size == len(Path(entry.path).read_bytes()) for entry in entries)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("program", type=Path, help="the weir program, e.g. target/release/weir")
    options.add_argument("--names", type=int, default=300_000, help="files that are made (default: %(default)s)")
    options.add_argument("--bytes", type=int, default=512, help="size of each (default: %(default)s)")
    options.add_argument("--dir", type=Path, help="directory on the disk to use (default: a temporary one)")
    args = options.parse_args()
    print(machine(args.program), flush=True)
    with tempfile.TemporaryDirectory(dir=args.dir) as top:
        cluster, second = Cluster(args.program, Path(top)), Path(top) / "second"
        try:
            cluster.up(6)
            weir(args.program, "up", "--dir", str(cluster.dir), "--mount", str(second))
            pids = [cluster.pid("mount-1"), cluster.pid("mount-2")]
            before = [memory(pid)[0] for pid in pids]
            names = [f"d{number}" for number in range(args.names // PER_DIRECTORY)]
            with ThreadPoolExecutor(4) as pool:
                begun = time.monotonic()
                list(pool.map(lambda name: make(cluster.mount / name, args.bytes), names))
                print(f"{args.names} files of {args.bytes} bytes made in {time.monotonic() - begun:.0f} s", flush=True)
                begun = time.monotonic()
                right = sum(pool.map(lambda name: read(second / name), names))
                print(f"{right} of them read through the other mount in {time.monotonic() - begun:.0f} s", flush=True)
            time.sleep(60)
            for name, pid, first in zip(("makes", "reads"), pids, before):
                now, most = memory(pid)
                print(
                    f"the mount that {name}: {first:.0f} MiB before, {most:.0f} MiB at most ({most / ALLOWED_MIB:.2f} of "
                    f"memory_mib), {now:.0f} MiB after a minute of rest"
                )
            if right != len(names) * PER_DIRECTORY:
                raise SystemExit("error: files are missing, or are wrong")
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
