"""The comparison from beginning to end: plan, tune, take turns, gate, write. One code for CPU and GPU."""

import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ullage
from benchmarks import prepared
from benchmarks.origin import origin, write_result
from benchmarks.peers import host_memory
from benchmarks.peers.build import compiled
from benchmarks.peers.engines import PACKAGES
from benchmarks.peers.jobs import Cell, Job, Outcome, model_config
from benchmarks.peers.processes import Runner
from benchmarks.peers.rows import Rounding, Row
from benchmarks.peers.summary import IN_MEMORY, Reference, cell_summary, verdict
from hwprofiles.profile import HardwareProfile
from planner.decisions import Precision
from planner.models.parameters import num_parameters

_BUILD_LIMIT_S = 420.0
_PACKAGES = ("torch", "transformers", "numba", "numpy", "deepspeed", "torchao")
# Of a bound that PyTorch's allocator enforces: it holds libraries' workspaces too, and gaps between what is in use.
# Where it meets the bound, it gives gaps back to the driver, for which training waits a second and more.
_PLANNED_SHARE = 0.92
# Of training in memory, per parameter: weights and gradients in both types, and both moments; see engines.InMemory.
_IN_MEMORY_BYTES = {("bf16", "fp32"): 20, ("fp32", "fp32"): 16, ("bf16", "bf16"): 8}  # by Cell.dtype and Cell.state
_TUNED_ITERATIONS = (1, 3)  # warm-up and timed: enough to rank settings


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to compare.

    Attributes:
        cells: what is trained, the most important first: what there is no time for is not begun.
        rows: by whom.
        device: on what.
        profiles: the machine's, by threads that compute (0 where a GPU does).
        num_rounds: processes per row and cell; in each round all rows of a cell take their turn.
        num_warm_up, num_timed: iterations of each.
        most_settings: how many of every peer are tried, the likeliest first; ``None``: all.
        output: result file, written after every process.
    """

    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]
    device: str
    profiles: dict[int, HardwareProfile]
    num_rounds: int
    num_warm_up: int
    num_timed: int
    most_settings: int | None
    output: Path


def request_of(cell: Cell, profile: HardwareProfile, device: str) -> ullage.Request:
    """Return what our engine's plan is made for.

    Raises:
        ValueError: there is no such model, or the device has less memory.
    """
    if cell.device_memory_bytes is not None:
        share = _PLANNED_SHARE if device == "cuda" else 1.0
        profile = profile.with_device_memory(int(share * cell.device_memory_bytes))
    return ullage.Request(
        model_config(cell.model),
        profile,
        seq_len=cell.seq_len,
        micro_batch=cell.micro_batch,
        num_micro_batches=cell.num_micro_batches,
        precision=Precision(weights=cell.dtype, master="bf16" if cell.state == "bf16" else None),
        optimizer="adamw-bf16" if cell.state == "bf16" else "adamw",
        clip=cell.max_norm > 0,
    )


class Comparison:
    """All processes of one comparison, and what they have found so far.

    Args:
        settings: how to compare.
        runner: starts processes.
        folder: existing, for plans.
    """

    def __init__(self, settings: Settings, runner: Runner, folder: Path) -> None:
        self._settings = settings
        self._runner = runner
        self._folder = folder
        self._begin = origin(*_PACKAGES, beside=runner.peers, gpu=settings.device == "cuda")
        self._outcomes: dict[Cell, dict[str, list[Outcome]]] = {
            cell: {row.name: [] for row in self._rows(cell)} for cell in settings.cells
        }
        self._references: dict[Cell, dict[Rounding, Reference]] = {cell: {} for cell in settings.cells}
        self._plans: dict[Cell, str] = {}
        self._chosen: dict[tuple[Cell, str], dict[str, Any]] = {}
        self._tried: dict[Cell, dict[str, list[dict[str, Any]]]] = {cell: {} for cell in settings.cells}
        self._notes: dict[str, Any] = {}
        self._not_begun = list(settings.cells)
        self._ceilings: dict[Cell, Outcome] = {}
        self._memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def run(self) -> dict[str, Any]:
        """Compare, and return what was written."""
        self._build()
        for cell in self._settings.cells:
            if self._runner.clock.left_s < 1:
                self._say(f"{cell.name}: not begun, no time is left")
                continue
            self._not_begun.remove(cell)
            self._plan(cell)
            self._refer(cell)
            for row in self._rows(cell):
                self._tune(cell, row)
            for _ in range(self._settings.num_rounds):
                for row in self._rows(cell):
                    self._measure(cell, row)
        return self._write()

    def _rows(self, cell: Cell) -> list[Row]:
        return [row for row in self._settings.rows if cell.state in row.states]

    def _build(self) -> None:
        """Let DeepSpeed compile its optimizer before anything is timed."""
        if not any(PACKAGES.get(row.engine) == "deepspeed" for row in self._settings.rows):
            return
        if self._runner.peers is not None and compiled(self._runner.peers):
            return
        begin_s = time.monotonic()
        job = Job(Cell("llama-tiny", seq_len=16), "zero2", device=self._device, num_warm_up=1, num_timed=1)
        outcome = self._runner.run(job, min(_BUILD_LIMIT_S, self._runner.clock.left_s / 3))
        self._notes["deepspeed_build"] = {"seconds": time.monotonic() - begin_s, "error": outcome.error}
        self._say(f"DeepSpeed's extension: {outcome.error or 'ready'}")

    def _plan(self, cell: Cell) -> None:
        """Plan a cell; what cannot be planned is told in our row."""
        begin_s = time.monotonic()
        try:
            request = request_of(cell, self._settings.profiles[cell.compute_threads], self._device)
            plan = prepared.planned(request, cell.name)
        except ValueError as error:
            self._outcomes[cell]["ours"] = [Outcome(error=f"not planned: {error}")]
            return
        path = self._folder / f"{cell.name}.json"
        path.write_text(plan.to_json(), encoding="utf-8")
        self._plans[cell] = str(path)
        seconds = time.monotonic() - begin_s
        self._notes.setdefault("planning_s", {})[cell.name] = seconds
        self._say(f"{cell.name}: planned in {seconds:.1f} s, {plan.prediction.iteration_s:.3f} s per iteration")

    def _refer(self, cell: Cell) -> None:
        """Train in memory with the stock loop over parameters: what every loss curve is held to.

        Where that cannot be, engines are held to one another.
        """
        too_large = self._too_large(cell)
        for rounding in dict.fromkeys(row.rounding(cell) for row in self._rows(cell)):
            once = self._settings.num_rounds == 1 and rounding == "nearest"  # it is the ceiling's only round too
            settings = {"fused": once, "rounding": rounding} | self._recompute(cell)
            job = self._job(cell, "in_memory", settings)
            outcome = Outcome(error=too_large) if too_large else self._runner.run(job)
            if once:
                self._ceilings[cell] = outcome
            if outcome.error is None:
                self._references[cell][rounding] = Reference(IN_MEMORY, outcome.losses)
                self._say(f"{cell.name}: reference, losses {outcome.losses[0]:.4f} -> {outcome.losses[-1]:.4f}")
            else:
                self._notes.setdefault("references", {})[cell.name] = outcome.error
                self._say(f"{cell.name}: engines are held to one another, not to {IN_MEMORY}: {outcome.error}")

    def _too_large(self, cell: Cell) -> str | None:
        """Return why training in memory need not be tried on a GPU, if so: trying takes time that others need."""
        needed_bytes = _IN_MEMORY_BYTES[cell.dtype, cell.state] * num_parameters(model_config(cell.model))
        device_bytes = self._begin.get("gpu_bytes", math.inf)
        if needed_bytes <= device_bytes:
            return None
        return (
            f"not tried: weights, gradients and moments take {needed_bytes / 1e9:.1f} GB, "
            f"and the device has {device_bytes / 1e9:.1f} GB"
        )

    def _tune(self, cell: Cell, row: Row) -> None:
        """Try a row's settings once each and keep the fastest that trains as the reference does.

        Without a reference that is the fastest of all that train; what it is measured with is held to other engines.
        """
        candidates = row.candidates(self._device, recompute=cell.recompute, most=self._settings.most_settings)
        self._chosen[cell, row.name] = candidates[0]
        if len(candidates) == 1 or row.kind == "ours":
            return
        first = next((c for c in self._settings.cells if c.like(cell)), cell)
        if first != cell:  # was tuned with another batch of the same model and threads
            self._chosen[cell, row.name] = self._chosen[first, row.name]
            return
        tried = self._tried[cell].setdefault(row.name, [])
        for settings in candidates:
            outcome = self._run(self._job(cell, row.engine, settings, *_TUNED_ITERATIONS))
            known = self._references[cell].get(row.rounding(cell))
            references = (known,) if known else ()
            status, why = verdict([outcome], references, cell)
            tried.append({"settings": settings, "status": status, "why": why, "iteration_s": _median(outcome)})
            self._say(f"{cell.name}: {row.name} {settings}: {tried[-1]['iteration_s']:.3f} s {why}")
            if status == "not installed":
                break  # nor will it be with other settings
        counted = [entry for entry in tried if entry["status"] in {"ok", "not checked"}]
        if counted:
            self._chosen[cell, row.name] = min(counted, key=lambda entry: float(entry["iteration_s"]))["settings"]

    def _measure(self, cell: Cell, row: Row) -> None:
        """Run a row's next process, unless one has failed already."""
        outcomes = self._outcomes[cell][row.name]
        if row.engine == "in_memory" and not outcomes and (too_large := self._too_large(cell)):
            outcomes.append(Outcome(error=too_large))
        if any(outcome.error is not None for outcome in outcomes) or self._runner.clock.left_s < 1:
            return
        settings = self._chosen[cell, row.name]
        known = self._ceilings.get(cell) if row.engine == "in_memory" and settings == self._recompute(cell) else None
        outcome = known or self._run(self._job(cell, row.engine, settings))
        if outcome.error is None or self._runner.clock.left_s >= 1:  # not its fault that the time was up
            outcomes.append(outcome)
        self._write()
        self._say(f"{cell.name}: {row.name}: {outcome.error or f'{_median(outcome):.3f} s per iteration'}")

    def _run(self, job: Job) -> Outcome:
        too_large = host_memory.too_large(job, self._memory_bytes)
        return Outcome(error=too_large) if too_large else self._runner.run(job)

    def _job(
        self,
        cell: Cell,
        engine: str,
        settings: dict[str, Any],
        num_warm_up: int | None = None,
        num_timed: int | None = None,
    ) -> Job:
        return Job(
            cell=cell,
            engine=engine,
            settings=settings,
            device=self._device,
            num_threads=cell.compute_threads or self._runner.num_cores,
            num_cores=self._runner.num_cores,
            num_warm_up=self._settings.num_warm_up if num_warm_up is None else num_warm_up,
            num_timed=self._settings.num_timed if num_timed is None else num_timed,
            plan=self._plans.get(cell) if engine == "ours" else None,
        )

    def _write(self) -> dict[str, Any]:
        cells = {
            cell.name: {
                **dataclasses.asdict(cell),
                **self._summary(cell),
                "settings": {row.name: self._chosen.get((cell, row.name)) for row in self._rows(cell)},
                "tried": self._tried[cell],
            }
            for cell in self._settings.cells
        }
        result = {
            **self._begin,
            "load_average_after": os.getloadavg()[0],
            "num_rounds": self._settings.num_rounds,
            "num_warm_up": self._settings.num_warm_up,
            "num_timed": self._settings.num_timed,
            "notes": self._notes,
            "not_begun": [cell.name for cell in self._not_begun],
            "cells": cells,
        }
        write_result(self._settings.output, result)
        return result

    def _summary(self, cell: Cell) -> dict[str, Any]:
        gemm = self._settings.profiles[cell.compute_threads].device.gemm.get(cell.dtype)
        peak_flop_per_s = gemm.best_rate_per_s() if gemm else None
        return cell_summary(cell, self._rows(cell), self._outcomes[cell], self._references[cell], peak_flop_per_s)

    @staticmethod
    def _recompute(cell: Cell) -> dict[str, Any]:
        return {"recompute": True} if cell.recompute else {}

    @property
    def _device(self) -> Any:
        return self._settings.device

    def _say(self, text: str) -> None:
        print(f"[{self._runner.clock.left_s:4.0f} s left] {text}", file=sys.stderr, flush=True)


def _median(outcome: Outcome) -> float:
    return statistics.median(outcome.iteration_s) if outcome.iteration_s else float("nan")


def table(cells: dict[str, Any], rows: Sequence[str]) -> str:
    """Return the result as lines to print."""
    lines = []
    for name, cell in cells.items():
        if all(found["status"] == "not run" for found in cell["rows"].values()):
            lines.append(f"{name}: not run, no time was left")
            continue
        lines.append(name)
        if cell["reference"] != IN_MEMORY:
            lines.append(f"  losses are held to those of {cell['reference']}")
        for row in rows:
            if (found := cell["rows"].get(row)) is None:
                continue
            if "tokens_per_s" in found:
                figures = (
                    f"{found['tokens_per_s']:9.0f} tokens/s {found['iteration_s']:8.3f} s "
                    f"{found['peak_rss_bytes'] / 1e9:6.2f} GB  start {found['start_up_s']:5.1f} s"
                ) + (f"  MFU {100 * found['mfu']:4.1f} %" if "mfu" in found else "")
                lines.append(f"  {row:16} {figures}  {_state(found['state'])}  {found['status']} {found['why']}")
            else:
                lines.append(f"  {row:16} {found['status']}: {found['why']}")
        lines += [f"  {key}: {cell[key]:.3f}" for key in cell if key.startswith("ours_over")]
        lines += [f"  {key}: {cell[key]:.3f}" for key in ("prediction_error", "replayed_over_measured") if key in cell]
    return "\n".join(lines)


def _state(state: dict[str, Any]) -> str:
    """Return the types of master copy, moments and gradients, and whether gradients are clipped."""
    types = "/".join(state[name] or "?" for name in ("master", "moments", "gradients"))
    return f"state {types} {'clipped' if state['clipping'] else 'not clipped'}"
