"""Random modules, captured, planned and executed: losses and weights of training in memory, bit for bit."""

import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_modules import BATCH, INPUT, LENGTH, NOISE, WIDTH, Counting, Random, Recipe, Stream, recipes
from test_execution import SUBGROUP_PARAMS, decided
from training import ReferenceOptimizer, weights

from executor.options import Options
from executor.prepare import prepare_session
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32, Decisions, Place, UnitDecision
from planner.graph import Batch, Unit, build_graph, units
from planner.models.captured import CapturedModel
from planner.plan.planning import InfeasibleError, make_plan
from planner.schedule.tasks import Tier
from planner.terms import Storage
from ullage.capture import capture_module

FOLDER = tempfile.TemporaryDirectory(prefix="ullage-nvme-")
NUMBERS = itertools.count()


class Attached(torch.nn.Module):
    """Two layers, one of which lets the loss have its weight by an attribute, before or behind what it returns."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.before, self.weight, self.scale = before, parameter(), parameter()

    def forward(self, x):
        if self.before:
            self.penalty = torch.tanh(x @ self.weight)
        y = x @ self.scale
        if not self.before:
            self.penalty = torch.tanh(y @ self.weight)
        return y


class Penalised(torch.nn.Module):
    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.first, self.attached = torch.nn.Linear(WIDTH, WIDTH), Attached(before=before)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.last(self.attached(self.first(x)))
        return y.mean() + self.attached.penalty.mean()


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(WIDTH, WIDTH))


def test_weights_that_backward_reaches_unseen_are_there_with_what_reads_them() -> None:
    """They would be read in backward before they are brought."""
    apart = units_of(capture_module(lambda: Penalised(before=True), [INPUT], "fp32"))
    joined = units_of(capture_module(lambda: Penalised(before=False), [INPUT], "fp32"))
    assert [unit.name for unit in apart] == ["first", "attached", "last"]
    assert [unit.name for unit in joined] == ["first", "attached"]
    assert {"attached.weight", "last.weight"} < {*joined[1].sizes}


def units_of(model: CapturedModel) -> tuple[Unit, ...]:
    return units(build_graph(model, Batch(model.micro_batch, model.seq_len, 4)))


def make(recipe: Recipe) -> tuple[Random, torch.optim.AdamW]:
    torch.manual_seed(7)
    model = Random(recipe).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model: torch.nn.Module, optimizer) -> list[float]:
    seen = []
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    NOISE.manual_seed(7)
    for iteration in range(2):
        torch.manual_seed(iteration)
        loss = model(torch.randn(BATCH, LENGTH, WIDTH))
        for module in model.modules():
            if isinstance(module, Counting):  # what happens after the first pass stays, though a second one follows
                module.calls += 10
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@given(recipe=recipes(), data=st.data())
@settings(max_examples=examples(40), phases=[Phase.explicit, Phase.generate])
def test_training_under_any_decisions_is_that_in_memory(recipe: Recipe, data: st.DataObject) -> None:
    found = units_of(captured(recipe))
    trained_as_in_memory(recipe, found, data.draw(decided(found, "fp32")))


@pytest.mark.parametrize("kind", ["table", "running", "counting", "drawing", "statistics", "linear-dropout"])
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_a_second_pass_finds_what_the_first_one_found_and_leaves_no_trace(kind: str, activations: str) -> None:
    recipe = Recipe((Stream((kind, kind, "linear-gelu")),))
    found = units_of(captured(recipe))
    assert any(unit.recompute for unit in found)
    chosen = {
        unit.name: UnitDecision(
            params="host",
            activations=activations if all(u.recompute for u in found if u.segment == unit.segment) else "keep",
            update=(Place.CPU,) * -(-unit.num_params // SUBGROUP_PARAMS),
        )
        for unit in found
    }
    decisions = Decisions(
        policy="test",
        precision=FP32,
        micro_batch=4,
        subgroup_params=SUBGROUP_PARAMS,
        num_param_slots=1,
        clip=True,
        units=chosen,
    )
    trained_as_in_memory(recipe, found, decisions)


SEQUENCES = {
    "lone-linears": Recipe((Stream(("linear-gelu",) * 5, container="sequential"),)),
    "buffers": Recipe((Stream(("linear-gelu",) * 3), Stream(("buffered",) * 3))),
    "lists-inside": Recipe((Stream(("listed",) * 3), Stream(("linear-gelu-linear",) * 2))),
    "no-grad": Recipe((Stream(("linear-gelu",) * 3), Stream(("linear-gelu",) * 3)), no_grad=True),
}


@pytest.mark.part(3)
@pytest.mark.parametrize(("name", "storage"), [*((name, "never") for name in SEQUENCES), ("lone-linears", "nvme")])
def test_what_is_planned_into_little_memory_is_executed(name: str, storage: Storage) -> None:
    """Down to where nothing fits, with all that is computed again then."""
    recipe = SEQUENCES[name]
    model = captured(recipe)
    machine = load_profile("rtx4090-12ssd")
    ways = set()
    capacity_bytes = 2**30
    while True:
        request = Request(
            model,
            machine.with_device_memory(capacity_bytes),
            precision=FP32,
            micro_batch=model.micro_batch,
            seq_len=model.seq_len,
            subgroup_params=100,
            storage=storage,
        )
        try:
            plan = make_plan(request, max_simulations=30)
        except InfeasibleError:
            break
        trained_as_in_memory(recipe, units_of(model), plan.decisions)
        ways |= {unit.activations for unit in plan.decisions.units.values()}
        capacity_bytes = int(0.8 * plan.prediction.memory[Tier.GPU].peak_bytes)
    assert len(ways) > 1


def captured(recipe: Recipe) -> CapturedModel:
    return capture_module(lambda: Random(recipe), [INPUT], "fp32", as_on_gpu=False)


def trained_as_in_memory(recipe: Recipe, found: tuple[Unit, ...], decisions: Decisions) -> None:
    expected_model, reference = make(recipe)
    expected = train(expected_model, ReferenceOptimizer(reference))
    states = [str(getattr(module, "state", "")) for module in expected_model.modules()]
    model, given_optimizer = make(recipe)
    options = Options(num_threads=1, storage_dir=Path(FOLDER.name) / str(next(NUMBERS)), audit="first")
    model, optimizer = prepare_session(model, given_optimizer, found, decisions, options)
    with optimizer.session:
        assert train(model, optimizer) == expected
        audited = optimizer.session.audit.result
        assert audited is not None
        assert audited.largest == 0
        assert set(audited.left_out.values()) <= {"it ran several times", "it did not run"}
        buffers = dict(model.named_buffers())
        assert [str(getattr(m, "state", "")) for m in model.modules()] == states
        final = {path: weight.clone() for path, weight in optimizer.session.full_parameters().items()}
    assert not [path for path, b in expected_model.named_buffers() if not torch.equal(b, buffers[path])]
    expected_weights = weights(expected_model)
    assert final.keys() == expected_weights.keys()
    assert not [path for path in final if not torch.equal(final[path], expected_weights[path])]
