"""Our training beside that of peers on one GPU: same model, text, arithmetic and device memory.

    python benchmarks/gpu/peers.py --tries 1 --rounds 1 --budget 550         one setting per peer, one process each
    python benchmarks/gpu/peers.py --models llama-3.2-3b --cells large long  tuned, three processes each

Cells are trained one after another, the most important first: 8k tokens per step, where peers have to be beaten, of a
model that every peer's state fits 128 GiB of host memory with, then of a larger one; 64k, where training in memory has
to be matched; the largest model that trains at all, which may use all of the device, since no host of 128 GiB holds it;
weights in bf16 that are their own master copies, beside engines that keep nothing else; then the rest of four models by
seven batches. What --budget leaves no time for is not begun, and named. An engine that keeps more than the host has is
not started, and its row says so. Memory is pinned for all without rounding it up to a power of two.

Peers are installed by ``pip install --target PEERS -r benchmarks/requirements-peers.txt``; one that is not there is a
row that says so. The device's memory is bounded for all but the ceiling, by PyTorch's allocator, as soon as the
engine is made, so that what an engine keeps on it is paid for. Where the model does not fit at all, its rows say so.
Losses are held to training in memory; where that does not fit the device, to those of other engines, and a row that
nobody else can be set beside says that it is not checked. All rows of a cell have master copies and moments of one
type, and each states which, that of its gradients, and whether they are clipped.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.peers.command import Rounds, add_arguments, compare
from benchmarks.peers.jobs import Cell
from hwprofiles.registry import load_profile
from ullage.calibrate import CalibrationOptions, calibrate
from ullage.cli.arguments import parse_bytes

OUTPUT = Path(__file__).parents[2] / "out" / "gpu" / "peers.json"
# sequences, tokens of each, micro-batches, norm, whether peers recompute, type of master copy and moments
SHAPES: dict[str, tuple[int, int, int, float, bool, Literal["fp32", "bf16"]]] = {
    "small": (1, 2048, 1, 1.0, False, "fp32"),
    "large": (4, 2048, 1, 0.0, True, "fp32"),
    "larger": (8, 2048, 1, 1.0, True, "fp32"),
    "long": (2, 4096, 1, 1.0, True, "fp32"),
    "accumulated": (1, 2048, 8, 1.0, False, "fp32"),
    "tokens-64k": (4, 2048, 8, 0.0, True, "fp32"),
    "all-bf16": (4, 4096, 1, 0.0, True, "bf16"),
}
_LARGEST = "llama-2-13b"
MODELS = ("llama-3.2-3b", "llama-2-7b", "llama-3.1-8b", _LARGEST)
FIRST = (
    ("llama-3.2-3b", "large"),
    ("llama-2-7b", "large"),
    ("llama-3.2-3b", "tokens-64k"),
    ("llama-2-7b", "long"),
    ("llama-3.1-8b", "large"),
    (_LARGEST, "small"),
    ("llama-3.1-8b", "all-bf16"),
)


def chosen(models: Sequence[str] | None, shapes: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Return models and shapes of all cells, the most important first; what is asked for is in the order asked for."""
    grid = tuple((model, shape) for model in models or MODELS for shape in shapes or SHAPES)
    if models or shapes:
        return grid
    return tuple(dict.fromkeys(FIRST + grid))


def cell_of(model: str, shape: str, device_bytes: int | None, threads: int) -> Cell:
    """Return a cell; without ``device_bytes`` 30 GB of the device are used, or all of it for the largest model."""
    micro_batch, seq_len, accumulation, max_norm, recompute, state = SHAPES[shape]
    batch = (micro_batch, seq_len, accumulation, max_norm)
    if device_bytes is None and model != _LARGEST:
        device_bytes = 30_000_000_000
    return Cell(model, "bf16", *batch, device_bytes, threads, recompute, state)


def main() -> None:
    """Calibrate if need be, compare, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, OUTPUT)
    parser.add_argument("--tries", type=int, metavar="N", help="settings per peer, of which the best is kept (all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes per row (3)")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help=f"see `ullage models` ({', '.join(MODELS)})")
    parser.add_argument("--cells", nargs="+", choices=SHAPES, help="batches, of every model (all)")
    parser.add_argument(
        "--device-memory", type=parse_bytes, metavar="SIZE", help=f"of every engine (30GB; for {_LARGEST} all there is)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: does it run? (llama-tiny)")
    args = parser.parse_args()
    if args.profile:
        profile = load_profile(args.profile)
    else:
        options = CalibrationOptions(quick=True, device="gpu" if args.device == "cuda" else "host")
        profile = calibrate(options, lambda *_: None)[0]
    threads = profile.device.num_cores
    cells = [cell_of(*names, args.device_memory, threads) for names in chosen(args.models, args.cells)]
    rounds = Rounds(args.rounds, *((2, 5) if args.rounds == 1 else (5, 20)), args.tries)
    compare(args, args.device, tuple(cells), {threads: profile}, rounds)


if __name__ == "__main__":
    main()
