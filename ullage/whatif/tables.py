"""A study as a table with one row per point, for CSV and Parquet."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from hwprofiles.files import check_output, write_whole
from planner.schedule.tasks import Tier
from ullage.whatif.study import Checkpoints, Point, Study

SUFFIXES: Final = (".csv", ".parquet")
_FIGURES: Final = (
    *("num_devices", "num_nodes", "iteration_s", "tokens_per_s", "tokens_per_iteration", "model_flop_per_s"),
    *("bound_by", "bound_s", "gap", "goodput_tokens_per_s"),
)
_CHECKPOINTS: Final = ("waste", "overhead", "most_lost_s")


def every_words(saved: Checkpoints) -> str:
    """Return the intervals of checkpoints as text, in iterations by level."""
    return ", ".join(f"{level} {every}" for level, every in saved.every.items())


def check_table_path(path: Path) -> None:
    """Check that a table can be written to a path. Call it before anything is computed.

    Raises:
        ValueError: the path ends in neither ``.csv`` nor ``.parquet``, or cannot be written.
        ModuleNotFoundError: the path ends in ``.parquet``, and pyarrow is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--table {path}: ends in neither .csv nor .parquet; choose one of them")
    check_output("--table", path)
    if path.suffix == ".parquet":
        _pyarrow()


def write_table(study: Study, path: Path) -> None:
    """Write the rows to a file in one step, as CSV or Parquet by the ending of its name.

    Raises:
        ModuleNotFoundError: pyarrow, which Parquet needs, is missing.
        OSError: the file cannot be written.
    """
    found = [_row(study, point) for point in study.points]
    columns = list(found[0]) if found else []
    if path.suffix == ".parquet":
        pyarrow, parquet = _pyarrow()
        table = pyarrow.table({column: _one_type([row[column] for row in found]) for column in columns})
        data = io.BytesIO()
        parquet.write_table(table, data)
        write_whole(path, data.getvalue())
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_whole(path, text.getvalue())


def _row(study: Study, point: Point) -> dict[str, Any]:
    """Return a point's settings, then its figures. All rows have the same columns; missing ones are empty."""
    row: dict[str, Any] = {"model": point.model, "hardware": point.hardware}
    for axis in study.axes:
        row[f"{axis.name}_factor" if axis.relative else axis.name] = point.settings[axis.name]
        if axis.relative:
            varied = point.varied.get(axis.name)
            row[axis.name] = varied.after if varied else None
    figures, missing_bytes = point.figures, point.result.missing_bytes
    row |= {"status": point.result.status, **_read(figures, _FIGURES)}
    for tier in Tier:
        row[f"{tier}_peak_bytes"] = figures.memory[tier].peak_bytes if figures and tier in figures.memory else None
        row[f"{tier}_missing_bytes"] = missing_bytes.get(tier)
    saved = figures.checkpoints if figures else None
    row |= {"checkpoint_every": every_words(saved) if saved else None, **_read(saved, _CHECKPOINTS)}
    row["reason"] = point.result.reason
    if study.prices is None:
        return row
    currency = study.prices.currency
    names = {"per_hour": f"{currency}_per_hour", "per_million_tokens": f"{currency}_per_million_tokens"}
    names |= {"run": f"run_{currency}", "run_s": "run_s", "in_time": "in_time"}
    return row | {names[name]: value for name, value in _read(point.cost, names).items()} | {"on_front": point.on_front}


def _read(of: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(of, name, None) for name in names}  # of ``None``, nothing but ``None``


def _one_type(values: Sequence[Any]) -> list[Any]:
    """Return values of a column in one type: ``str`` if any value is, else ``float`` if any is."""
    if any(isinstance(value, str) for value in values):
        return [None if value is None else str(value) for value in values]
    if any(isinstance(value, float) for value in values):
        return [None if value is None else float(value) for value in values]
    return list(values)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a .parquet table needs pyarrow; pip install 'ullage[parquet]', or give a .csv", name="pyarrow"
        ) from error
    return pa, parquet
