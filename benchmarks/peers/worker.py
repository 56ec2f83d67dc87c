"""One process, one engine, one cell; the driver starts ``python -m benchmarks.peers.worker JOB.json OUTCOME.json``."""

import os
import resource
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.peers.engines import ENGINES, one_rank_environment
from benchmarks.peers.jobs import Job, Outcome
from benchmarks.peers.training import train


def run(job: Job) -> Outcome:
    """Train the job; whatever it raises becomes the outcome's error."""
    try:
        torch.set_num_threads(job.num_threads)
        trainer = ENGINES[job.engine](job)
        torch.set_num_threads(job.num_threads)  # some engines, and numba's first kernel, set it
        start_up_s = time.time() - job.started_s
        losses, iteration_s, total_s = train(job, trainer)
        peak_device_bytes = torch.cuda.max_memory_reserved() if job.device == "cuda" else None
        peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
        detail = trainer.close()
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
