"""Parts that the benchmarks of growth share: a cluster of one machine, files, a writer, the disk's own rate."""
import json
import os
import platform
import statistics
import subprocess
import threading
import time
from pathlib import Path

MB = 1_000_000
FRAME_BYTES = 2 * MB
FRAMES_PER_FILE = 16
BLOCK_BYTES = 4 << 20
FILE_BYTES = 16 * BLOCK_BYTES


def weir(program: Path, *args: str) -> str:
    done = subprocess.run([str(program), *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"weir {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def machine(program: Path) -> str:
    version = weir(program, "--version").strip()
    return f"{platform.node()}, {os.cpu_count()} cores, Linux {platform.release()}, {version}"


class Cluster:
    """A cluster of `weir up` and one mount."""

    def __init__(self, program: Path, top: Path):
        self.program, self.dir, self.mount = program, top / "w", top / "m"

    def up(self, targets: int) -> None:
        weir(self.program, "up", "--dir", str(self.dir), "--targets", str(targets), "--scheme", "ec:4+2",
             "--mount", str(self.mount))

    def down(self) -> None:
        subprocess.run([str(self.program), "down", "--dir", str(self.dir)], capture_output=True)

    def run(self, *args: str) -> str:
        return weir(self.program, *args, "--dir", str(self.dir))

    def json(self, *args: str):
        return json.loads(self.run(*args, "--json"))

    def status(self) -> dict:
        """Its exit status tells of troubles."""
        asked = [str(self.program), "status", "--json", "--dir", str(self.dir)]
        return json.loads(subprocess.run(asked, capture_output=True, text=True).stdout)

    def used(self) -> dict[str, tuple[int, int]]:
        """Used bytes and capacity of each target."""
        return {t["target"]: (t["used"], t["capacity"]) for t in self.json("target", "list")}

    def cpu_seconds(self, names: str) -> float:
        """Of the processes with such names, while they run."""
        total = 0
        for file in (self.dir / "run").glob(f"{names}.pid"):
            stat = Path(f"/proc/{json.loads(file.read_text().splitlines()[-1])['pid']}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(stat[11]) + int(stat[12])
        return total / os.sysconf("SC_CLK_TCK")

    def pid(self, name: str) -> int:
        return json.loads((self.dir / "run" / f"{name}.pid").read_text().splitlines()[-1])["pid"]


def frame(number: int) -> bytes:
    return (b"%015d\n" % number) * (FRAME_BYTES // 16)


class Writer(threading.Thread):
    """Frames one after the other, each synced, at most `rate` a second (0: as many as can be). Files are
    written again after `kept` frames, or (`fresh`) removed, and others are written."""

    def __init__(self, top: Path, rate: float, kept: int, fresh: bool = False):
        super().__init__(daemon=True)
        self.top, self.rate, self.files, self.fresh = top, rate, kept // FRAMES_PER_FILE, fresh
        self.taken, self.error, self.stops = [], None, False

    def path(self, file: int) -> Path:
        return self.top / f"frames-{file if self.fresh else file % self.files}"

    def run(self) -> None:
        number, due = 0, time.monotonic()
        while not self.stops and not self.error:
            data, begun = frame(number), time.monotonic()
            try:
                at, first = number // FRAMES_PER_FILE, number % FRAMES_PER_FILE == 0
                if first and self.fresh and at >= self.files:
                    self.path(at - self.files).unlink()
                file = os.open(self.path(at), os.O_CREAT | os.O_WRONLY | (os.O_TRUNC if first else os.O_APPEND))
                os.write(file, data)
                os.fsync(file)
                os.close(file)
            except OSError as error:
                self.error = error
                continue
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

    def end(self) -> None:
        """Stops, and reads all frames that it has kept."""
        self.stops = True
        self.join(60)
        if self.error:
            raise RuntimeError(f"a frame failed: {self.error}")
        last = len(self.taken)
        for path in self.top.glob("frames-*"):
            data = path.read_bytes()
            for at in range(0, len(data), FRAME_BYTES):
                number = int(data[at:at + 15])
                if data[at:at + FRAME_BYTES] != frame(number) or number >= last:
                    raise RuntimeError(f"{path.name}: the frame at {at} is wrong")


def raw_write(top: Path, size: int) -> float:
    """MB/s that the disk under `top` writes by itself."""
    path, block = top / "raw", os.urandom(BLOCK_BYTES)
    begun = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    took = time.monotonic() - begun
    path.unlink()
    return size / MB / took


def raw_rate(top: Path, size: int = 512 << 20) -> float:
    raw = statistics.median(raw_write(top, size) for _ in range(3))
    print(f"the disk by itself writes {raw:.0f} MB/s (median of 3)")
    return raw


def fill(top: Path, size: int) -> None:
    """Files of random bytes, each synced."""
    block = os.urandom(BLOCK_BYTES)
    for number in range(max(1, size // FILE_BYTES)):
        with open(top / f"old-{number}", "wb", buffering=0) as file:
            for _ in range(FILE_BYTES // BLOCK_BYTES):
                file.write(block)
            os.fsync(file.fileno())


def spread(values: list[float]) -> str:
    """The median, and the least and most of several runs."""
    median = statistics.median(values)
    return f"{median:.2f}" if len(values) == 1 else f"{median:.2f} ({min(values):.2f} to {max(values):.2f})"
