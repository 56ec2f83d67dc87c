"""How fast a checkpoint is written and read with no training beside it, against the bare drive.

    python benchmarks/cpu/checkpoint_drive.py                   about six minutes where nothing else runs
    python benchmarks/cpu/checkpoint_drive.py --folder DIR      on another drive

In each round a checkpoint is *written*, from the call until it is durable and known; read and checked (*verify*), every
byte; and brought back into training (*restore*), checked on the way. In turns with these, with nothing else under way,
a loop of direct transfers writes and reads as many bytes, in chunks of the same size by as many threads.
"""

import argparse
import concurrent.futures
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ullage
from benchmarks.cpu.peers import calibrated
from benchmarks.cpu.saving import Training, plan_for
from benchmarks.origin import origin, write_result
from benchmarks.peers.jobs import Cell, Job
from executor.checkpoint.files.system_calls import Files, write_all
from executor.checkpoint.format.reader import Checkpoint
from executor.direct_io import enable_direct_io, pages
from planner.checkpoints.policy import CHUNK_BYTES, NUM_THREADS
from planner.plan.planning import default_precision

OUTPUT = Path(__file__).parents[1] / "results" / "cpu_checkpoint_drive.json"
MODEL, DEVICE_MEMORY_BYTES, SEQ_LEN = "opt-350m", 2_000_000_000, 16
WRITES_OF_A_ROUND = 3  # one after another, as rates of a drive that others use too vary more than what is compared


def raw_write(path: Path, data: memoryview) -> float:
    """Write so many bytes past the page cache, from memory that is in no cache either, and sync; return bytes/s.

    Over what is there already, as checkpoints are written over what older ones leave: a drive may be faster with blocks
    that it was told are free, and slower while it is told so.
    """
    start_s = time.perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, len(data))
    enable_direct_io(fd, probes=False)
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        chunks = range(0, len(data), CHUNK_BYTES)
        list(pool.map(lambda at: write_all(Files(), fd, data[at : at + CHUNK_BYTES], at), chunks))
    os.fsync(fd)
    os.close(fd)
    return len(data) / (time.perf_counter() - start_s)


def raw_read(path: Path, num_bytes: int) -> float:
    """Read so many bytes past the page cache by as many threads as we do, each into one buffer; return bytes/s."""

    def read(first: int) -> None:
        for at in range(first * CHUNK_BYTES, num_bytes, NUM_THREADS * CHUNK_BYTES):
            os.preadv(fd, [buffers[first]], at)

    buffers = [pages(CHUNK_BYTES).data for _ in range(NUM_THREADS)]
    start_s = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    enable_direct_io(fd, probes=False)
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(read, range(NUM_THREADS)))
    os.close(fd)
    return num_bytes / (time.perf_counter() - start_s)


def bandwidths(training: Training, checkpoints: ullage.Checkpoints, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Return rates of writing and reading a checkpoint, ours and raw, and the medians of their ratios."""
    training.iterate()
    write(training, checkpoints)  # the first makes files, and finds no old ones
    with Checkpoint(checkpoints.levels.fastest.folder(training.step)) as checkpoint:
        num_bytes = checkpoint.num_bytes
    whole_bytes = num_bytes // CHUNK_BYTES * CHUNK_BYTES
    memory = pages(whole_bytes).data
    for at in range(0, whole_bytes, CHUNK_BYTES):
        memory[at : at + CHUNK_BYTES] = os.urandom(CHUNK_BYTES)
    raw = folder / "raw"
    raw_write(raw, memory)

    def newest() -> Path:
        return checkpoints.levels.fastest.folder(training.step)

    writes: list[dict[str, float]] = []
    reads: list[dict[str, float]] = []
    for number in range(num_rounds):
        for turn in range(WRITES_OF_A_ROUND):
            training.iterate()
            ways: list[tuple[str, Callable[[], float]]] = [
                ("ours", lambda: num_bytes / write(training, checkpoints)),
                ("raw", lambda: raw_write(raw, memory)),
            ]
            writes.append({name: measure() for name, measure in (ways if (number + turn) % 2 else ways[::-1])})
        ways = [
            ("verify", lambda: rate_of(newest(), Checkpoint.verify)),
            ("restore", lambda: rate_of(newest(), lambda c: ullage.restore(training.optimizer, c))),
            ("raw", lambda: raw_read(raw, whole_bytes)),
        ]
        reads.append({name: measure() for name, measure in (*ways[number % 3 :], *ways[: number % 3])})
    return {
        "checkpoint_bytes": num_bytes,
        "num_writers": NUM_THREADS,
        "num_readers": NUM_THREADS,
        "raw_write_bytes_per_s": statistics.median(r["raw"] for r in writes),
        "raw_read_bytes_per_s": statistics.median(r["raw"] for r in reads),
        "write_of_raw": statistics.median(r["ours"] / r["raw"] for r in writes),
        "verify_of_raw": statistics.median(r["verify"] / r["raw"] for r in reads),
        "restore_of_raw": statistics.median(r["restore"] / r["raw"] for r in reads),
        "writes_bytes_per_s": writes,
        "reads_bytes_per_s": reads,
    }


def write(training: Training, checkpoints: ullage.Checkpoints) -> float:
    """Write a checkpoint, and return the seconds until it was durable and known."""
    checkpoints.settle()
    training.optimizer.session.synchronize()  # updates of the last iteration may still be under way
    start_s = time.perf_counter()
    checkpoints.save(training.step)
    checkpoints.take_remaining()
    path = checkpoints.levels.fastest.folder(training.step)
    while not path.exists():
        time.sleep(1e-3)
    seconds = time.perf_counter() - start_s
    checkpoints.settle()
    return seconds


def rate_of(path: Path, read: Callable[[Checkpoint], object]) -> float:
    """Return the bytes/s at which a checkpoint is read in some way, from opening it on."""
    start_s = time.perf_counter()
    with Checkpoint(path) as checkpoint:
        read(checkpoint)
    return checkpoint.num_bytes / (time.perf_counter() - start_s)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the drive to measure (default: where temporary files are)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of everything (7)")
    parser.add_argument("--model", default=MODEL, help=f"whose state is written ({MODEL})")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="PATH", help="result file")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warnings.filterwarnings("ignore")
    began = origin("torch")
    profile = calibrated(1)
    cell = Cell(args.model, default_precision(profile.device).weights, 1, SEQ_LEN, 1, 1.0, DEVICE_MEMORY_BYTES, 1)
    training = Training(plan_for(cell, profile), Job(cell, "ours", num_threads=1, num_warm_up=0, num_timed=10**6))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        checkpoints = ullage.Checkpoints(training.optimizer, ullage.Level(folder / "ours"))
        found = bandwidths(training, checkpoints, folder, args.rounds)
        checkpoints.close()
    result = {
        **began,
        "model": args.model,
        **found,
    }
    write_result(args.output, result)
    for key, value in result.items():
        if key not in {"writes_bytes_per_s", "reads_bytes_per_s"}:
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
