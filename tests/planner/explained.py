"""Plans that tests explain."""

import functools

from machines import machine

from planner.choices.request import Request
from planner.costs.model import CostModel
from planner.decisions import Decisions
from planner.explain.bench import Bench, changed
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.search import Scorer
from planner.simulate.prediction import Prediction
from ullage.rivals.lowering import lower
from ullage.rivals.tricks import bench_of


@functools.cache
def bench(name: str) -> Bench:
    """Return a plan to explain: on one device, without clipping, on two ranks, and with much to stream."""
    request = {
        "one": {"hardware": machine(gpu_bytes=1.3e8, cpu_params_per_s=1e9)},
        "unclipped": {"hardware": machine(gpu_bytes=1.3e8, cpu_params_per_s=1e9), "clip": False},
        "two": {"hardware": machine(gpu_bytes=1.1e8, devices_per_node=2, cpu_params_per_s=5e8), "num_devices": 2},
        "slow": {"hardware": machine(gpu_bytes=1.4e8, cpu_params_per_s=3e8, issue_s=0), "micro_batch": 2},
    }[name]
    request = {"seq_len": 256, "micro_batch": 1, "subgroup_params": 300_000, **request}
    return bench_of(make_plan(Request(resolve_model("demo-llama"), **request), 60))  # type: ignore[arg-type]


NAMES = ("one", "unclipped", "two", "slow")


def predicted(explained: Bench, decisions: Decisions, plan: Plan | None = None) -> Prediction:
    """Return what the planner predicts for decisions, from the plan file alone."""
    plan = plan or explained.plan
    units = plan.units()
    cost = CostModel.of(plan.hardware, units, decisions)
    return Scorer(units, plan.seq_len, cost, lower=lower).predict(decisions)


def with_decisions(explained: Bench, **options: object) -> Bench:
    """Return the same model and machine, decided otherwise."""
    return bench_of(explained.plan.model_copy(update={"decisions": changed(explained.decisions, **options)}))
