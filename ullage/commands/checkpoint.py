"""``ullage checkpoint``: look after checkpoints."""

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from executor.checkpoint import Checkpoint, CheckpointError, Store
from executor.checkpoint.store import LEAST_KEPT
from ullage.arguments import positive_int
from ullage.commands import Subparsers, command_parser
from ullage.console import console, write_json
from ullage.formatting import si

EXIT_FAILED = 1


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "checkpoint",
        run,
        "Look after the checkpoints that `ullage execute --checkpoint-dir DIR` makes: list them, check every byte of\n"
        "them, export weights for transformers, and remove all but the newest.",
        """
        ullage checkpoint ls checkpoints/
        ullage checkpoint verify checkpoints/
        ullage checkpoint export checkpoints/ --output-dir my-model/
        ullage checkpoint prune checkpoints/ --keep 3
        """,
    )
    parser.add_argument("action", choices=("ls", "verify", "export", "prune"), metavar="ls|verify|export|prune")
    parser.add_argument("path", type=Path, metavar="DIR", help="a folder of checkpoints; for verify and export, or one")
    parser.add_argument("--to", choices=("hf",), default="hf", help="export: weights as transformers reads them (hf)")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="export: a new folder for them")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="export: of weights (bfloat16)"
    )
    parser.add_argument(
        "--keep",
        type=positive_int,
        default=LEAST_KEPT,
        metavar="N",
        help=f"prune: the newest N that are whole stay ({LEAST_KEPT}, which is the least)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Do it."""
    if not args.path.is_dir():
        raise CheckpointError(f"{args.path} is no folder; give the --checkpoint-dir of a run")
    return int({"ls": _list, "verify": _verify, "export": _export, "prune": _prune}[args.action](args))


def _list(args: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for path in Store(args.path).folders():
        try:
            checkpoint = Checkpoint(path)
        except CheckpointError as error:
            found.append({"path": str(path), "step": None, "damaged": str(error)})
            continue
        time = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        found.append(
            {
                "path": str(path),
                "step": checkpoint.manifest.step,
                "num_bytes": checkpoint.num_bytes,
                "num_tensors": len(checkpoint.manifest.tensors),
                "num_ranks": len(checkpoint.manifest.extra["ranks"]),
                "written": time,
            }
        )
    if args.json:
        write_json(found)
        return 0
    for entry in found:
        _say(
            f"{entry['path']}: {entry['damaged']}"
            if "damaged" in entry
            else f"{entry['path']}: step {entry['step']}, {si(entry['num_bytes'], 'B')} in {entry['num_tensors']} "
            f"tensors of {entry['num_ranks']} rank(s), {entry['written']}"
        )
    if not found:
        _say(f"no checkpoints in {args.path}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    for path in _chosen(args.path):
        try:
            with Checkpoint(path) as checkpoint:
                checkpoint.verify()
        except CheckpointError as error:
            results.append({"path": str(path), "holds": False, "why": str(error)})
        else:
            results.append({"path": str(path), "holds": True})
        if not args.json:
            last = results[-1]
            _say(f"{last['path']}: {'whole' if last['holds'] else last['why']}")
    if args.json:
        write_json(results)
    return 0 if results and all(result["holds"] for result in results) else EXIT_FAILED


def _export(args: argparse.Namespace) -> int:
    if args.output_dir is None:
        raise ValueError("export needs --output-dir DIR, a new folder for the weights")
    from ullage.exporting import export_hf  # noqa: PLC0415 - torch takes seconds

    count = 0

    def export(checkpoint: Checkpoint) -> None:
        nonlocal count
        count = export_hf(checkpoint, args.output_dir, args.dtype)

    if _is_one(args.path):
        with Checkpoint(args.path) as checkpoint:
            export(checkpoint)
    else:
        found = Store(args.path).newest(export)
        if found.checkpoint is None:
            raise CheckpointError(f"{args.path} has no whole checkpoint; see `ullage checkpoint verify {args.path}`")
        checkpoint = found.checkpoint
    facts = {"path": str(checkpoint.folder), "output_dir": str(args.output_dir), "num_tensors": count}
    if args.json:
        write_json(facts)
    else:
        _say(f"{count} tensors of {checkpoint.folder} written to {args.output_dir}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    removed = [str(path) for path in Store(args.path).prune(args.keep)]
    if args.json:
        write_json({"removed": removed})
    else:
        _say("removed " + (", ".join(removed) if removed else "nothing"))
    return 0


def _chosen(path: Path) -> Iterator[Path]:
    return iter([path]) if _is_one(path) else iter(Store(path).folders())


def _is_one(path: Path) -> bool:
    return path.name.startswith("step-")


def _say(line: str) -> None:
    console().print(line, markup=False, soft_wrap=True)
