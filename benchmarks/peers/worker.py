"""One process, one engine, one cell; the driver starts ``python -m benchmarks.peers.worker JOB.json OUTCOME.json``."""

import gc
import os
import resource
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.peers.engines import ENGINES, one_rank_environment
from benchmarks.peers.host_memory import EXACT, pinned_exactly
from benchmarks.peers.jobs import Job, Outcome
from benchmarks.peers.training import train


def run(job: Job) -> Outcome:
    """Train the job; whatever it raises becomes the outcome's error."""
    try:
        torch.set_num_threads(job.num_threads)
        if job.device == "cuda" and job.engine in EXACT:
            torch.Tensor.pin_memory = pinned_exactly  # type: ignore[method-assign,assignment]
        trainer = ENGINES[job.engine](job)
        torch.set_num_threads(job.num_threads)  # some engines, and numba's first kernel, set it
        if job.device == "cuda":
            _bound_device(job)
        start_up_s = time.time() - job.started_s
        losses, iteration_s, total_s = train(job, trainer)
        peak_device_bytes = torch.cuda.max_memory_reserved() if job.device == "cuda" else None
        peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
        # How often its memory was full until it gave unused segments back: each takes milliseconds, on any engine.
        retries = {"num_alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"]} if job.device == "cuda" else {}
        detail = trainer.close() | retries
    except Exception as error:  # noqa: BLE001 - a row of the table, with the reason
        traceback.print_exc()
        text = str(error).strip().splitlines()
        return Outcome(error=f"{type(error).__name__}: {text[0] if text else ''}"[:500])
    return Outcome(
        losses=tuple(losses),
        iteration_s=tuple(iteration_s[job.num_warm_up :]),
        total_s=total_s,
        start_up_s=start_up_s,
        first_iteration_s=iteration_s[0],
        peak_rss_bytes=peak_rss_bytes,
        peak_device_bytes=peak_device_bytes,
        detail=detail,
    )


def _bound_device(job: Job) -> None:
    """Leave an engine as much of the GPU as our plan has: what it keeps there is paid for. The ceiling has it all.

    To be called when the engine is made. Every engine may use all of the GPU until then, for there the model is made,
    which is quicker than on the host, whole and in a type that only some engines keep. What it took is given back, and
    is not part of the peak; what is still there by now is the engine's own.

    Raises:
        MemoryError: the engine holds more already.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit_bytes = job.cell.device_memory_bytes
    if limit_bytes is None or job.engine == "in_memory":
        return
    held_bytes = torch.cuda.memory_reserved()
    if held_bytes > limit_bytes:
        raise MemoryError(
            f"the engine keeps {held_bytes / 1e9:.2f} GB on the device before it trains, more than the "
            f"{limit_bytes / 1e9:.2f} GB that every engine may use; give all of them more with --device-memory"
        )
    total_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total_bytes, 1.0))


def main() -> None:
    """Read the job, write the outcome."""
    job = Job.load(Path(sys.argv[1]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one_rank_environment(port)
    run(job).save(Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines leave threads and processes behind that would keep this one waiting


if __name__ == "__main__":
    main()
