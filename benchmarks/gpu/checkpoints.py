"""What training on a GPU loses to a checkpoint after every iteration: by ours, ``torch.save`` and PyTorch's own.

    python benchmarks/gpu/checkpoints.py --profile profile.json                       into the host's memory (/dev/shm)
    python benchmarks/gpu/checkpoints.py --profile profile.json --folder /mnt/nvme    onto a drive
    python benchmarks/gpu/checkpoints.py --profile laptop.json --tiny                 does it run?

The method is that of ``benchmarks/cpu/checkpoint_engines.py``, with ``torch.distributed.checkpoint.async_save`` as a
peer, and iterations of 64k tokens: those of one forward are shorter than any memory takes for the state. *Lost* is
the share by which iterations with checkpoints take longer than without.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cpu.checkpoint_engines import Study, report
from benchmarks.cpu.engines import Blocking, DcpAsync
from benchmarks.origin import origin, write_result
from benchmarks.peers.jobs import Cell, Job
from hwprofiles.registry import load_profile

OUTPUT = Path(__file__).parents[2] / "out" / "gpu" / "checkpoints.json"
GOAL_LOST = 0.01
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what is measured is this memory, in a folder of our own
_DEVICE_BYTES = 30_000_000_000


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="local", metavar="NAME|PATH", help="the machine's profile (its own)")
    parser.add_argument("--folder", type=Path, default=_SHARED_MEMORY, help=f"for checkpoints ({_SHARED_MEMORY})")
    parser.add_argument("--model", default="qwen2.5-0.5b", help="(qwen2.5-0.5b)")
    parser.add_argument("--iterations", type=int, default=4, metavar="N", help="of each run (4)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of all runs (2)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="PATH", help="result file")
    args = parser.parse_args()
    profile = load_profile(args.profile)
    on_gpu = profile.device.kind == "gpu"
    began = origin("torch", gpu=on_gpu)
    cell = Cell(args.model, "bf16", 4, 2048, 8, 1.0, _DEVICE_BYTES)
    if args.tiny:
        cell = Cell("llama-tiny", "bf16", 1, 64, 2, 1.0, 100_000_000)
    threads = profile.device.num_cores or 1
    job = Job(cell, "ours", device="cuda" if on_gpu else "cpu", num_threads=threads, num_warm_up=0, num_timed=10**6)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        peers = {"torch.save": Blocking, "dcp.async_save": DcpAsync}
        study = Study(job, profile, Path(name), args.iterations, (1,), peers)
        found: dict[str, Any] = study.measure(args.rounds)
    result = {
        **began,
        "folder": str(args.folder),
        "num_iterations": args.iterations,
        "num_rounds": args.rounds,
        "goal_lost": GOAL_LOST,
        "lost": {row["engine"]: row["cost_s"] / found["iteration_s"] for row in found["rows"]},
        "absent": study.absent,
        "models": {cell.model: found},
    }
    write_result(args.output, result)
    print(report(result))
    for engine, lost in result["lost"].items():
        print(f"{engine} loses {lost:.2%} of an iteration")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
