"""Our training beside that of peers, without a GPU: same model, text, cores and arithmetic.

    python benchmarks/cpu/peers.py --peers PEERS --quick        about three minutes where nothing else runs
    python benchmarks/cpu/peers.py --peers PEERS                about fifteen
    python benchmarks/cpu/peers.py --peers PEERS --bf16-state   weights in bf16 that are their own master copies

Beside other programs neither the times nor the ratios mean much: threads that wait for one another at the end of every
kernel suffer out of proportion.

Peers are installed by ``pip install --target PEERS -r benchmarks/requirements-peers.txt``; one that is not there is a
row that says so. Every engine trains in a process of its own; rows take turns, and a row whose losses are not those of
training in memory counts for nothing.

Forward and backward are in bf16, or in fp32 where a plan would choose that: processors without instructions for bf16.
In cells that end in ``-1t`` one core stands in for the device: forward and backward of every engine run in one thread,
updates may use all cores. In the others all cores compute. Our plan may use so little of the device that its optimizer
has to be on the host; the peers on a CPU have no device to run out of.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.command import Rounds, add_arguments, compare
from benchmarks.peers.jobs import Cell
from hwprofiles.profile import Dtype, HardwareProfile
from hwprofiles.registry import load_profile
from planner.plan.planning import default_precision

OUTPUT = Path(__file__).parents[1] / "results" / "cpu_peers.json"
_BF16_STATE_BYTES = 420_000_000
TINY = (Cell("llama-tiny", "fp32", 2, 32, 2, 1.0, 3_000_000, 1),)


def cells(num_cores: int, dtype: Dtype, *, quick: bool) -> tuple[Cell, ...]:
    """Return what is trained; the device's memory holds weights and activations of a cell, and no optimizer."""
    few = max(num_cores // 2, 1)
    model, memory_bytes = "llama-79m", {"bf16": 500_000_000, "fp32": 900_000_000}[dtype]
    device = Cell(model, dtype, 1, 256, 1, 1.0, memory_bytes, few)
    accumulated = Cell(model, dtype, 1, 128, 4, 0.0, memory_bytes, few)
    every = Cell(model, dtype, 2, 256, 1, 1.0, memory_bytes, num_cores)
    return (device, every) if quick else (device, accumulated, every)


def calibrated(threads: int) -> HardwareProfile:
    """Measure this machine with ``threads`` cores in the device's place.

    A process of its own, as training is: there waiting threads sleep, and every kernel of several threads wakes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        command = [sys.executable, "-m", "ullage", "calibrate", "--quick", "--device-cores", str(threads)]
        subprocess.run([*command, "--output", str(path), "--json"], check=True, stdout=subprocess.DEVNULL)
        return load_profile(str(path))


def main() -> None:
    """Calibrate, compare, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, OUTPUT)
    parser.add_argument("--quick", action="store_true", help="two cells, one setting per peer, one process per row")
    parser.add_argument(
        "--bf16-state", action="store_true", help="master copies and moments in bf16, in the first cell alone"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and one process per row: does it work at all?"
    )
    args = parser.parse_args()
    num_cores = len(os.sched_getaffinity(0))
    few = 1 if args.tiny else max(num_cores // 2, 1)
    profiles = {n: load_profile(args.profile) if args.profile else calibrated(n) for n in sorted({few, num_cores})}
    dtype = default_precision(profiles[few].device).weights
    chosen = TINY if args.tiny else cells(num_cores, dtype, quick=args.quick)
    if args.bf16_state:
        chosen = (dataclasses.replace(chosen[0], dtype="bf16", state="bf16", device_memory_bytes=_BF16_STATE_BYTES),)
    quick = args.quick or args.tiny
    rounds = Rounds(1 if quick else 3, 2, 4 if quick else 5, 1 if quick else None)
    compare(args, "cpu", chosen, profiles, rounds)


if __name__ == "__main__":
    main()
