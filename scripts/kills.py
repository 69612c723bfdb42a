#!/usr/bin/env python3
"""Kills the metadata leader, the leading coordinator and members of etcd in turn, under programs that check.

One machine: three coordinators on an etcd of three, three copies of the metadata, six targets, two mounts. On both
mounts programs read and write the same files, names and counters: their histories must be linearizable. Git commits,
sqlite inserts rows, directories and links are made, renamed and removed without a sync, an HDF5 file is written and
followed (SWMR, if there is an h5py), and a writer creates and syncs files. Prints for each kind of kill how long the slowest of its steps took, and how long the next change of the cluster
map; ends with status 1 if anything was lost, wrong, or failed.
"""
import argparse
import fcntl
import json
import multiprocessing
import os
import platform
import queue
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

KINDS = ("leader", "coordinator", "etcd")
PATIENCE_S = 120
# The search for an order takes memory with each operation that overlaps others.
OPERATIONS_MAX = 400


class Wrong(Exception):
    """A promise is broken."""


def weir(program: Path, *args: str) -> str:
    done = subprocess.run([str(program), *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"weir {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def until(what: str, found, patience: float = PATIENCE_S):
    """The first answer of `found` that is not empty."""
    deadline, last = time.monotonic() + patience, None
    while time.monotonic() < deadline:
        try:
            answer = found()
            if answer:
                return answer
        except (RuntimeError, OSError, ValueError) as error:
            last = error
        time.sleep(0.05)
    raise RuntimeError(f"{what}: not after {patience} s; {last}")


# ---- histories

def linearizable(processes: list[list[tuple]], step, initial) -> bool:
    """Whether operations (called, returned, operation) can have happened one after another, each between its call and
    its return. The search of Wing and Gong with Lowe's memory. One list per process, which calls one at a time."""
    start = ((0,) * len(processes), initial)
    seen, left = {start}, [start]
    while left:
        counts, state = left.pop()
        heads = [(p, processes[p][n]) for p, n in enumerate(counts) if n < len(processes[p])]
        if not heads:
            return True
        first_return = min(event[1] for _, event in heads)
        for process, (called, _, operation) in heads:
            if called > first_return:
                continue
            after = step(state, operation)
            if after is None:
                continue
            point = (counts[:process] + (counts[process] + 1,) + counts[process + 1:], after[0])
            if point not in seen:
                seen.add(point)
                left.append(point)
    return False


def register(value, operation):
    kind, number = operation
    if kind == "write":
        return (number,)
    return (value,) if value == number else None


def counter(value, got):
    return (value + 1,) if got == value else None


def name(exists, operation):
    kind, found = operation
    after = {"create": True, "unlink": False, "look": exists}[kind]
    return (after,) if found == exists else None


OBJECTS = {"register": (register, 0), "held": (register, 0), "counter": (counter, 0), "name": (name, False)}


def write_number(file: int, number: int) -> None:
    os.pwrite(file, b"%020d" % number, 0)


def use_register(file: int, number: int, writes: bool):
    if writes:
        write_number(file, number)
        return ("write", number)
    return ("read", int(os.pread(file, 20, 0)))


def use_counter(path: Path):
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = int(os.pread(file, 20, 0))
        write_number(file, number + 1)
        return number
    finally:
        os.close(file)


def use_name(path: Path, kind: str):
    """The operation, and whether the name existed before it."""
    try:
        if kind == "create":
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return (kind, False)
        if kind == "unlink":
            path.unlink()
        else:
            path.lstat()
        return (kind, True)
    except FileExistsError:
        return (kind, True)
    except FileNotFoundError:
        return (kind, False)


def use(kind: str, place: Path, held: int, number: int, dice: random.Random):
    if kind == "register":
        file = os.open(place / "register", os.O_RDWR)
        try:
            return use_register(file, number, dice.random() < 0.5)
        finally:
            os.close(file)
    if kind == "held":
        return use_register(held, number, dice.random() < 0.5)
    if kind == "counter":
        return use_counter(place / "counter")
    return use_name(place / "name", dice.choice(("create", "unlink", "look")))


def play(place: Path, process: int, stop, answers) -> None:
    """One process of a round: random operations, until it is to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dice, seen, number = random.Random(f"{place} {process}"), {kind: [] for kind in OBJECTS}, process << 32
    try:
        held = os.open(place / "held", os.O_RDWR)
        while not stop.is_set() and min(map(len, seen.values())) < OPERATIONS_MAX:
            kind, number = dice.choice(list(OBJECTS)), number + 1
            called = time.monotonic_ns()
            operation = use(kind, place, held, number, dice)
            seen[kind].append((called, time.monotonic_ns(), operation))
            time.sleep(dice.random() * 0.02)
        os.close(held)
        answers.put((process, seen, None))
    except (OSError, ValueError) as error:
        answers.put((process, seen, f"process {process}: {kind}: {error}"))


class Round:
    """Two processes on each mount use four objects while something is killed."""

    def __init__(self, mounts: list[Path], number: int):
        first = mounts[0] / f"round{number}"
        first.mkdir()
        for file in ("register", "held", "counter"):
            (first / file).write_bytes(b"%020d" % 0)
        self.stop, self.answers = multiprocessing.Event(), multiprocessing.Queue()
        places = [mount / first.name for mount in mounts for _ in range(2)]
        self.processes = [multiprocessing.Process(target=play, args=(place, n, self.stop, self.answers), daemon=True)
                          for n, place in enumerate(places, 1)]
        for process in self.processes:
            process.start()

    def check(self) -> int:
        """Ends the processes. The number of operations, all in order."""
        self.stop.set()
        seen, errors = [], []
        for _ in self.processes:
            try:
                _, events, error = self.answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise Wrong(f"a process of a round does not end within {PATIENCE_S} s") from None
            seen.append(events)
            errors += [error] if error else []
        for process in self.processes:
            process.join()
        if errors:
            raise Wrong("; ".join(errors))
        for kind, (step, initial) in OBJECTS.items():
            history = [events[kind] for events in seen]
            if not linearizable(history, step, initial):
                raise Wrong(f"no order explains what was seen of {kind}: {history}")
        return sum(len(events[kind]) for events in seen for kind in OBJECTS)


# ---- programs

class Program(threading.Thread):
    """Does one step after another until it is ended; keeps the slowest, and the first error."""

    def __init__(self, *places: Path):
        super().__init__(daemon=True)
        self.places, self.steps, self.slowest, self.error, self.ends = places, 0, 0.0, None, False

    def run(self) -> None:
        try:
            self.begin()
            while not self.ends:
                begun = time.monotonic()
                self.step(self.steps)
                self.slowest = max(self.slowest, time.monotonic() - begun)
                self.steps += 1
        except (OSError, RuntimeError, sqlite3.Error, Wrong) as error:
            self.error = f"{type(self).__name__}, step {self.steps}: {error}"

    def begin(self) -> None:
        pass

    def verify(self) -> None:
        pass


class Writer(Program):
    """Files, each created, written and synced."""

    def begin(self) -> None:
        (self.places[0] / "files").mkdir()

    def step(self, number: int) -> None:
        file = os.open(self.places[0] / "files" / f"f{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(file, b"%099d\n" % number)
        os.fsync(file)
        os.close(file)

    def verify(self) -> None:
        for number in range(self.steps):
            if (self.places[1] / "files" / f"f{number}").read_bytes() != b"%099d\n" % number:
                raise Wrong(f"file f{number} lacks its bytes")


class Names(Program):
    """Directories, links, renames, modes and removals, none of them synced; the other mount must find each."""
    KEPT = 20

    def begin(self) -> None:
        (self.places[0] / "names").mkdir()

    def step(self, number: int) -> None:
        top = self.places[0] / "names"
        new, made = top / f"new{number}", top / f"d{number}"
        new.mkdir()
        os.symlink(f"to {number}", new / "link")
        new.rename(made)
        made.chmod(0o700 + number % 64)
        if number >= self.KEPT:
            old = top / f"d{number - self.KEPT}"
            (old / "link").unlink()
            old.rmdir()
        if number % 10 == 0:
            self.compare(number + 1)

    def compare(self, steps: int) -> None:
        top, expected = self.places[1] / "names", range(max(0, steps - self.KEPT), steps)
        if (found := set(os.listdir(top))) != {f"d{number}" for number in expected}:
            raise Wrong(f"the other mount has {sorted(found)} after {steps} steps")
        for number in expected:
            made = top / f"d{number}"
            if os.readlink(made / "link") != f"to {number}" or made.stat().st_mode & 0o777 != 0o700 + number % 64:
                raise Wrong(f"d{number} differs on the other mount")

    def verify(self) -> None:
        self.compare(self.steps)


class Git(Program):
    """Commits in a repository, in turn from each mount."""

    def git(self, place: Path, *args: str) -> str:
        who = ["-c", "user.name=kills", "-c", "user.email=kills@localhost", "-c", "gc.auto=0", "-c", "safe.directory=*"]
        done = subprocess.run(["git", "-C", str(place / "git"), *who, *args], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"git {args[0]}: {done.stderr.strip()}")
        return done.stdout

    def begin(self) -> None:
        (self.places[0] / "git").mkdir()
        self.git(self.places[0], "init", "-q", ".")

    def step(self, number: int) -> None:
        place = self.places[number % 2]
        (place / "git" / f"file{number % 50}").write_text(f"{number}\n")
        self.git(place, "add", ".")
        self.git(place, "commit", "-q", "-m", f"commit {number}")

    def verify(self) -> None:
        self.git(self.places[1], "fsck", "--strict")
        found = int(self.git(self.places[1], "rev-list", "--count", "HEAD"))
        if found < self.steps:
            raise Wrong(f"git has {found} of {self.steps} commits")


class Sqlite(Program):
    """Rows, each a transaction; the other mount counts them."""

    def open(self, place: Path) -> sqlite3.Connection:
        return sqlite3.connect(place / "rows.db", timeout=PATIENCE_S, isolation_level=None)

    def begin(self) -> None:
        base = self.open(self.places[0])
        base.execute("pragma synchronous = full")
        base.execute("create table row (n integer primary key, text)")
        base.close()

    def step(self, number: int) -> None:
        writer = self.open(self.places[0])
        writer.execute("insert into row values (?, ?)", (number, "x" * 500))
        writer.close()
        if number % 10 == 9:
            reader = self.open(self.places[1])
            found = reader.execute("select count(*) from row").fetchone()[0]
            reader.close()
            if found != number + 1:
                raise Wrong(f"{found} of {number + 1} rows are seen")

    def verify(self) -> None:
        base = self.open(self.places[1])
        if base.execute("pragma integrity_check").fetchall() != [("ok",)]:
            raise Wrong("sqlite finds damage")
        if base.execute("select count(*) from row").fetchone()[0] < self.steps:
            raise Wrong("sqlite lacks rows")
        base.close()


SWMR_WRITER = """
import h5py, sys, time
with h5py.File(sys.argv[1], "w", libver="latest") as f:
    frames = f.create_dataset("frames", shape=(0, 64, 64), maxshape=(None, 64, 64), chunks=(1, 64, 64), dtype="i4")
    f.swmr_mode = True
    print("open", flush=True)
    for n in range(1 << 30):
        frames.resize(n + 1, axis=0); frames[n] = n + 1; frames.flush()
        print(n + 1, flush=True)
        time.sleep(0.02)
"""
SWMR_READER = """
import h5py, sys, time
with h5py.File(sys.argv[1], "r", libver="latest", swmr=True) as f:
    frames, seen = f["frames"], 0
    print("open", flush=True)
    while True:
        frames.refresh()
        # The last frame may be only announced: its bytes come with the flush.
        for n in range(seen, frames.shape[0] - 1):
            assert (frames[n] == n + 1).all(), (n, frames[n])
            seen = n + 1
        print(seen, flush=True)
        time.sleep(0.02)
"""


class Swmr(Program):
    """An HDF5 file that one mount appends to and the other follows."""

    python = None

    def begin(self) -> None:
        self.children = []
        for place, code in zip(self.places, (SWMR_WRITER, SWMR_READER)):
            child = subprocess.Popen([self.python, "-u", "-c", code, str(place / "frames.h5")], stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, text=True)
            self.children.append(child)
            if child.stdout.readline() != "open\n":
                raise RuntimeError(child.stdout.read())

    def step(self, number: int) -> None:
        """A frame is written; and it is followed, with the frames of before."""
        for child in self.children:
            line = child.stdout.readline()
            if not line.strip().isdigit():
                raise Wrong(f"{line}{child.stdout.read()}")
        self.followed = int(line)

    def verify(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        if self.followed < self.steps // 2:
            raise Wrong(f"{self.followed} of {self.steps} frames were followed")


# ---- the cluster

class Cluster:
    def __init__(self, program: Path, top: Path):
        self.program, self.dir = program, top / "w"
        self.mounts = [top / "a", top / "b"]

    def up(self, *args: str) -> None:
        weir(self.program, "up", "--dir", str(self.dir), *args)

    def found(self) -> None:
        mounts = [word for mount in self.mounts for word in ("--mount", str(mount))]
        self.up("--etcd", "3", "--copies", "3", *mounts)

    def ask(self, *args: str) -> str:
        return weir(self.program, *args, "--dir", str(self.dir))

    def copies(self, state: str) -> list[str]:
        listed = json.loads(self.ask("namespace", "list", "--json"))
        return [copy["node"] for copy in listed[0]["copies"] if copy["state"] == state]

    def is_whole(self) -> bool:
        return len(self.copies("current")) == 2 and len(self.copies("leads")) == 1

    def leading_coordinator(self) -> str:
        """The others do not listen."""
        def listens(node: str) -> bool:
            found = subprocess.run(["ss", "-xlH"], capture_output=True, text=True).stdout
            return str(self.dir / "socket" / f"{node}.sock") in found
        return until("a coordinator leads", lambda: next(filter(listens, (f"coord-{n}" for n in (1, 2, 3))), None))

    def kill(self, node: str) -> None:
        pid = json.loads((self.dir / "run" / f"{node}.pid").read_text().splitlines()[-1])["pid"]
        os.kill(pid, signal.SIGKILL)

    def change_map(self, number: int) -> None:
        until("the map can be changed", lambda: self.ask("home", "allow", f"file:///place-{number}") or True)

    def down(self) -> None:
        subprocess.run([str(self.program), "down", "--dir", str(self.dir)], capture_output=True)


def alive(programs: list[Program]) -> None:
    failed = [program.error for program in programs if program.error]
    if failed:
        raise Wrong("; ".join(failed))


def kill_one(cluster: Cluster, programs: list[Program], kind: str, number: int) -> tuple[float, float]:
    """The slowest step of the writer around a kill, and the time to the next change of the map."""
    until("the copies are whole", cluster.is_whole)
    victim = {"leader": lambda: cluster.copies("leads")[0], "coordinator": cluster.leading_coordinator,
              "etcd": lambda: f"etcd-{number % 3 + 1}"}[kind]()
    writer, played = programs[0], Round(cluster.mounts, number)
    before = writer.steps
    until("the writer works", lambda: writer.steps > before + 20 or writer.error)
    writer.slowest, begun = 0.0, time.monotonic()
    cluster.kill(victim)
    cluster.change_map(number)
    changed, before = time.monotonic() - begun, writer.steps
    until("the writer goes on", lambda: writer.steps > before + 20 or writer.error)
    took = writer.slowest
    operations = played.check()
    alive(programs)
    cluster.up()
    print(f"{number + 1}: {kind} {victim} killed: slowest step {took:.2f} s, map changed after {changed:.2f} s, "
          f"{operations} operations in order", flush=True)
    return took, changed


def percentiles(what: str, found: list[float]) -> str:
    found = sorted(found)
    p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
    return f"{what} p50 {statistics.median(found):.2f} s, p99 {p99:.2f} s, max {found[-1]:.2f} s"


def run(cluster: Cluster, kills: int, chosen: tuple[str, ...]) -> int:
    broken, kinds = [], {kind: [] for kind in chosen}
    programs = [Writer(*cluster.mounts), Names(*cluster.mounts), Git(*cluster.mounts), Sqlite(*cluster.mounts)]
    if Swmr.python:
        programs.append(Swmr(*reversed(cluster.mounts)))
    for program in programs:
        program.start()
    try:
        for number in range(kills):
            kind = chosen[number % len(chosen)]
            kinds[kind].append(kill_one(cluster, programs, kind, number))
        until("the copies are whole", cluster.is_whole)
    except (Wrong, RuntimeError) as error:
        broken.append(str(error))
    for program in programs:
        program.ends = True
    for program in programs:
        program.join(PATIENCE_S)
        try:
            alive([program])
            if program.is_alive():
                raise Wrong(f"{type(program).__name__} does not end")
            program.verify()
            print(f"{type(program).__name__}: {program.steps} steps, nothing is lost", flush=True)
        except (Wrong, RuntimeError, OSError, sqlite3.Error) as error:
            broken.append(str(error))
    for kind, times in kinds.items():
        if times:
            print(f"{kind} killed {len(times)} times: {percentiles('slowest step', [step for step, _ in times])}; "
                  f"{percentiles('next change of the map', [changed for _, changed in times])}")
    for violation in dict.fromkeys(broken):
        print(f"VIOLATION: {violation}", file=sys.stderr)
    return 1 if broken else 0


def find_h5py() -> str | None:
    for python in (str(Path(__file__).resolve().parent.parent / ".venv/bin/python"), sys.executable):
        try:
            if not subprocess.run([python, "-c", "import h5py"], capture_output=True).returncode:
                return python
        except OSError:
            continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weir", type=Path, help="the program")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", choices=KINDS, help="kill only these")
    args = parser.parse_args()
    program = args.weir.resolve()
    print(f"{platform.node()}, {os.cpu_count()} cores, Linux {platform.release()}, {weir(program, '--version').strip()}")
    Swmr.python = find_h5py()
    if not Swmr.python:
        print("h5py is not installed: HDF5 is left out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="weir-kills-") as top:
        cluster = Cluster(program, Path(top))
        try:
            cluster.found()
            return run(cluster, args.kills, (args.only,) if args.only else KINDS)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        finally:
            cluster.down()


if __name__ == "__main__":
    sys.exit(main())
