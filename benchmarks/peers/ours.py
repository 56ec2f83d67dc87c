"""Our engine: ``ullage.prepare`` around the same loop, on a plan that the driver has made."""

import contextlib
import statistics
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

import ullage
from benchmarks.peers.jobs import Job
from benchmarks.peers.replay import replay
from benchmarks.peers.training import adamw_options, loss_of, make_model, schedule_of
from hwprofiles.machine import keep_freed_memory
from planner.plan.document import load_plan
from planner.schedule.series import busy
from ullage.analysis.comparison import compare
from ullage.analysis.simulation import simulate

_METERED = 1  # iteration of the warm-up whose memory is measured, which slows it down
_FIRST_STEADY = 3


@final
class Ours:
    """A planned run. No settings: the plan has them."""

    def __init__(self, job: Job) -> None:
        assert job.plan is not None
        self._job = job
        self._plan = load_plan(Path(job.plan))
        if job.device == "cpu":
            keep_freed_memory()
        self._model = make_model(job.cell, job.device, home="cpu")
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self._model.parameters(), **adamw_options(job))
        if job.cell.state == "bf16":
            optimizer = ullage.AdamWBf16(self._model.parameters(), **adamw_options(job), bf16_stochastic_round=True)
        self._scheduler = schedule_of(optimizer)
        self._model, self._optimizer = ullage.prepare(self._model, optimizer, self._plan, audit="off")
        self._session = self._optimizer.session
        self._metering = contextlib.ExitStack()
        self._num_steps = 0

    def backward(self, tokens: Tensor) -> Tensor:
        """See :class:`Trainer`."""
        loss = loss_of(self._model, tokens)
        (loss / self._job.cell.num_micro_batches).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> None:
        """See :class:`Trainer`."""
        if self._job.cell.max_norm:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._job.cell.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        self._metering.close()
        self._num_steps += 1
        if self._num_steps == _METERED:
            self._metering.enter_context(self._session.metered())

    def synchronize(self) -> None:
        """See :class:`Trainer`."""
        self._session.synchronize()

    def close(self) -> dict[str, Any]:
        """See :class:`Trainer`."""
        measured = self._session.timeline()
        memory = {tier: use.peak_bytes for tier, use in self._session.memory().items()}
        attention = self._session.attention
        self._session.close()
        plan = self._plan
        steady = range(min(_FIRST_STEADY, measured.num_iterations - 2), measured.num_iterations - 1)
        simulation = simulate(plan)
        predicted_memory = {tier: use.peak_bytes for tier, use in plan.prediction.memory.items()}
        comparison = compare(simulation, measured, steady, predicted_memory, memory)
        return {
            "plan": plan_summary(plan),
            "predicted_and_measured": comparison.to_json(),
            "replayed_over_measured": replay(measured, steady),
            "attention": attention,
            "device_span_share": statistics.median(
                busy(measured, i)["gpu"].integral / measured.period_s(i) for i in steady
            ),
        }


def plan_summary(plan: ullage.Plan) -> dict[str, Any]:
    """Return where a plan puts things, in parameters, and what it promises."""
    chosen = plan.decisions.units
    places: dict[str, int] = {}
    for unit in plan.units():
        pieces = chosen[unit.name].update
        for place in pieces:
            places[place.value] = places.get(place.value, 0) + unit.num_params // len(pieces)
    return {
        "predicted_iteration_s": plan.prediction.iteration_s,
        "bound_s": plan.certificate.bound_s if plan.certificate else None,
        "updated_params": places,
        "fetched_units": sum(decision.params == "host" for decision in chosen.values()),
        "recomputed_units": sum(decision.activations == "recompute" for decision in chosen.values()),
        "num_units": len(chosen),
    }
