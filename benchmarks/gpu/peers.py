"""Our training beside that of peers on one GPU: same model, text, arithmetic and device memory.

    python benchmarks/gpu/peers.py --profile profile.json --quick       one cell, one setting per peer, one process each
    python benchmarks/gpu/peers.py --cells small large accumulated      tuned, three processes each

Peers are installed by ``pip install --target PEERS -r benchmarks/requirements-peers.txt``; one that is not there is a
row that says so. The device's memory is bounded for all but the ceiling, by PyTorch's allocator, as soon as the
engine is made, so that what an engine keeps on it is paid for. Where the model does not fit at all, its rows say so.
Losses are held to training in memory; where that does not fit the device, to those of other engines, and a row that
nobody else can be set beside says that it is not checked.
"""

import argparse
from pathlib import Path

from benchmarks.peers.command import Rounds, add_arguments, compare
from benchmarks.peers.jobs import Cell
from hwprofiles.calibrate import CalibrationOptions, calibrate
from hwprofiles.registry import load_profile
from ullage.arguments import parse_bytes
from ullage.commands.calibrate import kernels

OUTPUT = Path(__file__).parents[1] / "results" / "gpu" / "peers.json"
# sequences, tokens of each, micro-batches, norm, whether peers recompute
SHAPES = {
    "small": (1, 2048, 1, 1.0, False),
    "large": (4, 2048, 1, 0.0, True),
    "accumulated": (1, 2048, 8, 1.0, False),
    "long": (2, 4096, 1, 1.0, True),
}


def main() -> None:
    """Calibrate if need be, compare, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, OUTPUT)
    parser.add_argument("--quick", action="store_true", help="one setting per peer, one process per row")
    parser.add_argument("--model", default="llama-3.2-1b", help="see `ullage models` (llama-3.2-1b)")
    parser.add_argument("--cells", nargs="+", choices=SHAPES, default=["small"], help="batches (small)")
    parser.add_argument(
        "--device-memory", type=parse_bytes, default=20_000_000_000, metavar="SIZE", help="of every engine (20GB)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see whether this runs")
    args = parser.parse_args()
    if args.profile:
        profile = load_profile(args.profile)
    else:
        options = CalibrationOptions(quick=True, device="gpu" if args.device == "cuda" else "host")
        profile = calibrate(options, kernels(), lambda *_: None)[0]
    threads = profile.device.num_cores
    cells = []
    for name in args.cells:
        micro_batch, seq_len, accumulation, max_norm, recompute = SHAPES[name]
        batch = (micro_batch, seq_len, accumulation, max_norm)
        cells.append(Cell(args.model, "bf16", *batch, args.device_memory, threads, recompute))
    rounds = Rounds(1, 3, 7, quick=True) if args.quick else Rounds(3, 5, 20, quick=False)
    compare(args, args.device, tuple(cells), {threads: profile}, rounds)


if __name__ == "__main__":
    main()
