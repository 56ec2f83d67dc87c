"""Simulate a plan, or an engine policy in place of a plan or for a request."""

import dataclasses
from collections.abc import Callable, Iterator

from hwprofiles.profile import HardwareProfile
from planner.choices.request import Request
from planner.choices.variants import Variant, variants
from planner.costs.model import CostModel
from planner.decisions import Choice, Decisions
from planner.models.captured import Model
from planner.optimizers import OPTIMIZERS
from planner.plan.competition import compete
from planner.plan.document import Plan
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane
from planner.search import Candidate, Scorer, best_of
from planner.setup import Setup
from planner.simulate.machine import Simulation, run, run_until_steady
from planner.simulate.prediction import Workload
from ullage.rivals.best import best_of_engine, scorer_of
from ullage.rivals.engines.catalogue import POLICIES, STORAGE_POLICIES, can_run, policies_of
from ullage.rivals.engines.deepspeed import super_offload, twin_flow
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.engines.zenflow import zen_flow
from ullage.rivals.lowering import lower

OURS = "ullage"
ENGINES = POLICIES | STORAGE_POLICIES

# Enough iterations for a change of one lane to reach a steady state.
_ITERATIONS_OF_A_CHANGE = 6


@dataclasses.dataclass(frozen=True)
class Subject:
    """A set of decisions to simulate.

    Attributes:
        engine: the engine that decides, with its setting if it has one, such as ``twin-flow 0.4``.
        model, hardware: the model and the machine.
        workload: the model's units and the tokens per sequence.
        decisions: decisions of the engine.
        cost: cost model of the tasks.
    """

    engine: str
    model: Model
    hardware: HardwareProfile
    workload: Workload
    decisions: Decisions
    cost: CostModel

    def schedule(self) -> Schedule:
        """Return the schedule of one iteration."""
        return lower(self.workload.units, self.decisions, asynchronous=self.cost.asynchronous)

    def simulate(self, num_iterations: int | None = None) -> Simulation:
        """Simulate the schedule; see :func:`simulate`."""
        schedule, cost = self.schedule(), self.cost
        if num_iterations is None:
            return run_until_steady(schedule, cost)
        timeline = run(schedule, cost.prices(schedule), cost.capacities(), num_iterations)
        last = max(num_iterations - 2, 0)
        return Simulation(timeline, range(last, last + 1), converged=False)

    def iteration_with_half_the_work_s(self, schedule: Schedule, lane: Lane) -> float:
        """Return the iteration time if every task of one lane had half the work.

        The lane's share of the critical path is an upper limit of the saving, because other paths become critical.
        """
        prices = [
            dataclasses.replace(price, latency_s=price.latency_s / 2, duration_s=price.duration_s / 2)
            if task.lane is lane
            else price
            for task, price in zip(schedule.tasks, self.cost.prices(schedule), strict=True)
        ]
        timeline = run(schedule, prices, self.cost.capacities(), _ITERATIONS_OF_A_CHANGE)
        return timeline.period_s(_ITERATIONS_OF_A_CHANGE - 2)


def simulate(plan: Plan, num_iterations: int | None = None, decisions: Decisions | None = None) -> Simulation:
    """Simulate a plan's schedule on the plan's hardware.

    Args:
        plan: the plan to simulate.
        num_iterations: number of iterations; ``None``: until they repeat.
        decisions: other decisions to simulate for the plan's model and machine (see :func:`engine_decisions`).

    Returns:
        The timeline and the iteration to read. With ``num_iterations`` it is the last complete one.
    """
    return _subject_of(plan, OURS, plan.decisions if decisions is None else decisions).simulate(num_iterations)


def planned(plan: Plan, engine: str = OURS, setting: str | None = None) -> Subject:
    """Return a plan's decisions, or those of an engine in its place; see :func:`engine_decisions`."""
    return _subject_of(plan, _name(engine, setting), engine_decisions(plan, engine, setting))


def requested(request: Request, engine: str = OURS, setting: str | None = None) -> Subject:
    """Return an engine's decisions for a request, even if they do not fit; for ``ullage`` the best that search finds.

    Raises:
        ValueError: the engine or its setting does not exist.
    """
    variant, decisions = _decided(request, engine, setting)
    workload, cost = Workload(variant.setup.units, request.seq_len), variant.cost
    if decisions.precision != cost.precision:
        cost = CostModel.of(request.hardware, workload.units, decisions)
    return Subject(_name(engine, setting), request.model, request.hardware, workload, decisions, cost)


def engine_decisions(plan: Plan, engine: str, setting: str | None = None) -> Decisions:
    """Return the decisions of an engine policy for a plan's model, machine and batch.

    Args:
        plan: gives the model, the machine and the batch.
        engine: name of a policy (of :data:`ENGINES`), or ``ullage`` for the plan's own decisions.
        setting: the option that the policy leaves to its user: the fraction that the CPU updates (``twin-flow``,
            ``super-offload``), the stride (``interleaved``) or the steps between updates on the host (``zenflow``).
            ``None``: the best setting that the policy tries.

    Raises:
        ValueError: the policy or its setting does not exist.
    """
    if engine == OURS and setting is None:
        return plan.decisions
    tiles = {field: getattr(plan.constraints, field) for field in plan.decisions.tiles}
    request = dataclasses.replace(request_of(plan), **tiles)
    return _decided(request, engine, setting)[1]


def _decided(request: Request, engine: str, setting: str | None) -> tuple[Variant, Decisions]:
    """Return the better of whole logits and tiles. Degrees and batch sizes are those of the request."""
    rivals = variants(request)
    if engine == OURS and setting is None:
        found = compete(rivals)
        return found.own, found.decisions
    best = [_best(engine, setting, rival.setup, scorer_of(rival)) for rival in rivals]
    at = min(range(len(rivals)), key=lambda at: best[at].order)
    return rivals[at], best[at].decisions


def _best(engine: str, setting: str | None, setup: Setup, scorer: Scorer) -> Candidate:
    if engine not in ENGINES:
        names = ", ".join((OURS, *ENGINES)) if engine != OURS else "twin-flow, super-offload, interleaved, zenflow"
        raise ValueError(f"no engine {engine!r} takes {'that setting' if setting else 'part'}; choose one of {names}")
    state = OPTIMIZERS[setup.given.optimizer]
    if state.others and engine not in (known := policies_of(setup.given.optimizer)):
        raise ValueError(f"engine {engine} is not simulated with {state.words}; choose {' or '.join((OURS, *known))}")
    if not can_run(engine, setup, len(scorer.cost.layout.nodes())):
        raise ValueError(
            f"--engine {engine} cannot run this request: megatrain and streaming need one device, roundpipe needs one "
            "node without other parallelism, and zenflow, megatrain and streaming need adamw; choose another engine"
        )
    if engine == "streaming" and setting is None:
        return best_of_engine(setup, scorer, engine)
    policy = ENGINES[engine] if setting is None else _with_setting(engine, setting)
    return best_of(map(scorer.score, policy(setup)))


def _name(engine: str, setting: str | None) -> str:
    return engine if setting is None else f"{engine} {setting}"


def _subject_of(plan: Plan, engine: str, decisions: Decisions) -> Subject:
    units = plan.units(decisions)
    cost = CostModel.of(plan.hardware, units, decisions)
    return Subject(engine, plan.model, plan.hardware, Workload(units, plan.seq_len), decisions, cost)


def request_of(plan: Plan) -> Request:
    """Return a plan's request with the parallel degrees and batch sizes that the plan chose, without storage."""
    chosen = Choice.of(plan.decisions).model_dump(exclude={"data_parallel"})
    return dataclasses.replace(plan.request, **chosen, global_batch=None, storage="never")


def _with_setting(engine: str, setting: str) -> Callable[[Setup], Iterator[Decisions]]:
    if policy := {"twin-flow": twin_flow, "super-offload": super_offload}.get(engine):
        try:
            fraction = float(setting)
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise ValueError(f"{engine} {setting}: the fraction that the CPU updates must be between 0 and 1")
        return lambda setup: policy(setup, (fraction,))
    if engine == "zenflow":
        if not setting.isdecimal() or int(setting) < 1:
            raise ValueError(f"zenflow {setting}: the update interval must be a whole number of at least 1")
        return lambda setup: zen_flow(setup, (int(setting),))
    if engine == "interleaved":
        if not setting.isdecimal() or int(setting) < 1:
            raise ValueError(f"interleaved {setting}: the stride must be a whole number of at least 1")
        return lambda setup: interleaved(setup, (int(setting),))
    raise ValueError(f"{engine} {setting}: this engine has no setting; leave it out")
