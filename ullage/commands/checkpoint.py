"""``ullage checkpoint``: list, check, export and remove checkpoints."""

import argparse
from pathlib import Path
from typing import Any

from executor.checkpoint.files.opening import modified
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.format.manifest import MANIFEST_NAME
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.locating import checkpoint_at, located, place_at
from executor.checkpoint.places.place import newest_of, parse_name
from planner.terms import MIN_CHECKPOINTS
from ullage.cli.arguments import positive_int, saved_weights
from ullage.cli.exit_codes import CHECK_FAILED
from ullage.output.console import write_json
from ullage.output.formatting import si
from ullage.report.charts import Table
from ullage.report.terminal import answer, show
from ullage.training.levels import MEMORY, memory_folders

DESCRIPTION = """\
Manage the checkpoints of `ullage execute --checkpoint-dir PLACE`: list them, check every byte, export
weights for transformers, and remove all but the newest. A place is a folder, or a URL of fsspec."""
EXAMPLES = """
    ullage checkpoint ls checkpoints/
    ullage checkpoint verify checkpoints/
    ullage checkpoint export checkpoints/ --save my-model/
    ullage checkpoint prune checkpoints/ --keep 3
    ullage checkpoint ls s3://bucket/run-7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("action", choices=("ls", "verify", "export", "prune"), metavar="ls|verify|export|prune")
    parser.add_argument(
        "place",
        metavar="PLACE",
        help="folder or URL of the checkpoints; verify and export also take a single checkpoint",
    )
    parser.add_argument(
        "--save",
        type=saved_weights,
        default={},
        metavar="DIR[,dtype=TYPE]",
        help="export: a new folder for the weights, in the format of from_pretrained(). dtype: their type, bfloat16 "
        "(the default), float16 or float32",
    )
    parser.add_argument(
        "--keep",
        type=positive_int,
        default=MIN_CHECKPOINTS,
        metavar="N",
        help=f"prune: number of newest complete checkpoints to keep, at least {MIN_CHECKPOINTS} ({MIN_CHECKPOINTS})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Do it."""
    if args.place == MEMORY:
        there = ", ".join(map(str, memory_folders())) or "there is none now"
        raise CheckpointError(f"{MEMORY} has a folder for each plan; give one of these folders: {there}")
    path = located(args.place)
    if isinstance(path, Path) and not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a --checkpoint-dir of a run")
    return int({"ls": _list, "verify": _verify, "export": _export, "prune": _prune}[args.action](args))


def _list(args: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for path in place_at(args.place).folders():
        try:
            checkpoint = Checkpoint(path)
            written = modified(path / MANIFEST_NAME)
        except CheckpointError as error:
            found.append({"path": str(path), "step": None, "damaged": str(error)})
            continue
        found.append(
            {
                "path": str(path),
                "step": checkpoint.manifest.step,
                "num_bytes": checkpoint.num_bytes,
                "num_tensors": len(checkpoint.manifest.tensors),
                "num_ranks": len(checkpoint.manifest.extra["ranks"]),
                "written": written and written.isoformat(timespec="seconds"),
            }
        )
    columns = ("checkpoint", "step", "size", "tensors", "ranks", "written")
    whole = [entry for entry in found if "damaged" not in entry]
    rows = tuple(
        (
            entry["path"],
            str(entry["step"]),
            si(entry["num_bytes"], "B"),
            str(entry["num_tensors"]),
            str(entry["num_ranks"]),
            entry["written"] or "-",
        )
        for entry in whole
    )
    lines = [f"{entry['path']}: {entry['damaged']}" for entry in found if "damaged" in entry]
    lines += [] if found else [f"no checkpoints in {args.place}"]
    answer(args, found, *lines, *([Table("", columns, rows)] if rows else []))
    return 0


def _verify(args: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    chosen = [located(args.place)] if _is_single(args.place) else place_at(args.place).folders()
    if not chosen:
        raise CheckpointError(f"there are no checkpoints in {args.place}; give a --checkpoint-dir of a run")
    for path in chosen:
        try:
            with Checkpoint(path) as checkpoint:
                checkpoint.verify()
        except CheckpointError as error:
            results.append({"path": str(path), "holds": False, "why": str(error)})
        else:
            results.append({"path": str(path), "holds": True})
        if not args.json:
            last = results[-1]
            show(f"{last['path']}: {'whole' if last['holds'] else last['why']}")
    if args.json:
        write_json(results)
    return 0 if all(result["holds"] for result in results) else CHECK_FAILED


def _export(args: argparse.Namespace) -> int:
    if "" not in args.save:
        raise ValueError("export needs --save DIR, a new folder for the weights")
    folder = args.save[""]
    from ullage.training.exporting import export_hf  # noqa: PLC0415 - torch takes seconds

    count = 0

    def export(checkpoint: Checkpoint) -> None:
        nonlocal count
        count = export_hf(checkpoint, folder, args.save.get("dtype", "bfloat16"))

    if _is_single(args.place):
        with checkpoint_at(args.place) as checkpoint:
            export(checkpoint)
    else:
        found, _ = newest_of([place_at(args.place)], export)
        if found is None:
            raise CheckpointError(
                f"{args.place} has no complete checkpoint; see `ullage checkpoint verify {args.place}`"
            )
        checkpoint = found
    facts = {"path": str(checkpoint.folder), "output_dir": str(folder), "num_tensors": count}
    answer(args, facts, f"{count} tensors of {checkpoint.folder} written to {folder}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    if args.keep < MIN_CHECKPOINTS:
        raise ValueError(
            f"--keep {args.keep} is too few, because one checkpoint may be damaged; give --keep {MIN_CHECKPOINTS} or "
            "more"
        )
    place = place_at(args.place)
    removed = [str(path) for path in place.prune(args.keep)]
    if isinstance(place, FolderPlace):
        place.remove_spares()
    answer(args, {"removed": removed}, f"removed {', '.join(removed) or 'nothing'}")
    return 0


def _is_single(place: str) -> bool:
    return parse_name(place.rstrip("/").rpartition("/")[2]) is not None
