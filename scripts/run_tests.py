#!/usr/bin/env python3
"""Builds the test programs of the workspace and runs them, several at a time: most of them wait for clocks, disks and
other processes, and use a sixth of two cores when they run one after the other, as `cargo test` does. Each program's
output is printed as a whole when it ends. Ends like cargo: a summary, and status 101 if a program failed.

Usage: scripts/run_tests.py [cargo options, such as -p weir --test mount]
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

# These take a minute or more: they begin first.
LONG = ["seeds", "faults", "power", "posix", "replica", "trust", "coordinators", "crash_points", "cluster"]
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)
# A panic and the lines of its message, up to the backtrace: printed again before the summary.
PANIC = re.compile(r"^thread '.*' \(?.*panicked at .*\n(?:(?!stack backtrace:|note: ).*\n)*", re.MULTILINE)
PANIC_CHARS = 4000
FAILED = 101


@dataclass
class Program:
    name: str
    package: str
    executable: str
    directory: Path


def build(options):
    """The test programs, in the order in which cargo names them."""
    command = ["cargo", "test", "--locked", *options, "--no-run", "--message-format=json-render-diagnostics"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    programs = []
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["executable"] and message["profile"]["test"]:
            manifest = Path(message["manifest_path"])
            programs.append(
                Program(message["target"]["name"], manifest.parent.name, message["executable"], manifest.parent)
            )
    return programs


def run(program):
    print(f"    Starting {program.package} {program.name}", flush=True)
    begun = time.monotonic()
    env = dict(os.environ, CARGO="cargo", CARGO_MANIFEST_DIR=str(program.directory))
    done = subprocess.run(
        [program.executable],
        cwd=program.directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return program, done, time.monotonic() - begun


def main():
    programs = build(sys.argv[1:] or ["--workspace", "--tests"])
    programs.sort(key=lambda p: LONG.index(p.name) if p.name in LONG else len(LONG))
    begun, counts, failed = time.monotonic(), [0, 0, 0], []
    at_once = (os.cpu_count() or 1) + 1
    with ThreadPoolExecutor(at_once) as pool:
        for future in as_completed([pool.submit(run, program) for program in programs]):
            program, done, seconds = future.result()
            print(f"     Running {program.package} {program.name}, {seconds:.1f} s\n{done.stdout}", flush=True)
            for result in RESULT.findall(done.stdout):
                counts = [total + int(n) for total, n in zip(counts, result)]
            if done.returncode != 0:
                name = f"-p {program.package}, {program.name} (status {done.returncode})"
                failed.append((name, "".join(PANIC.findall(done.stdout))[:PANIC_CHARS]))
    for name, said in failed:
        print(f"error: test failed: {name}\n{said}")
    seconds = time.monotonic() - begun
    print(
        f"test result: {'FAILED' if failed else 'ok'}. {counts[0]} passed; {counts[1]} failed; {counts[2]} ignored; "
        f"{len(programs)} programs, {at_once} at a time; finished in {seconds:.0f} s"
    )
    sys.exit(FAILED if failed else 0)


if __name__ == "__main__":
    main()
