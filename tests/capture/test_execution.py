"""Captured models under random plans, against the same training in memory: the same bits."""

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from own_models import OWN, batch
from training import ReferenceOptimizer, weights

from executor.options import Options
from executor.prepare import prepare_session
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, Unit, build_graph, segments, units
from planner.schedule.tasks import Op
from ullage.capture import capture_module
from ullage.capture.recording import find_loss

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FOLDER = tempfile.TemporaryDirectory(prefix="ullage-nvme-")
NUMBERS = itertools.count()
SUBGROUP_PARAMS = 3000
ITERATIONS = 3


@functools.cache
def units_of(name: str, dtype: str) -> tuple[Unit, ...]:
    make, inputs = OWN[name]
    model = capture_module(lambda: make().to(DTYPES[dtype]), inputs, dtype, as_on_gpu=False)
    return units(build_graph(model, Batch(model.micro_batch, model.seq_len, 2 if dtype == "bf16" else 4)))


def make(name: str, dtype: str) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(7)
    model = OWN[name][0]().to(DTYPES[dtype]).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(name: str, dtype: str, model: torch.nn.Module, optimizer) -> list[float]:
    seen = []
    for iteration in range(ITERATIONS):
        args, kwargs = batch(name, DTYPES[dtype], seed=iteration)
        loss = find_loss(model(*args, **kwargs))[0]
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@functools.cache
def reference(name: str, dtype: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = make(name, dtype)
    return train(name, dtype, model, ReferenceOptimizer(optimizer)), weights(model)


@st.composite
def decided(draw: st.DrawFn, found: tuple[Unit, ...], dtype: str) -> Decisions:
    chosen = {}
    for segment in segments(found):
        ways = ["keep", "recompute", "offload", "offload-nvme"] if all(unit.recompute for unit in segment) else ["keep"]
        activations = draw(st.sampled_from(ways))
        for unit in segment:
            count = -(-unit.num_params // SUBGROUP_PARAMS)
            places = draw(
                st.lists(st.sampled_from([Place.GPU, Place.STREAM, Place.CPU]), min_size=count, max_size=count)
            )
            host = Place.GPU not in places and count and draw(st.booleans())
            chosen[unit.name] = UnitDecision(
                params="host" if host else "gpu", activations=activations, update=tuple(places)
            )
    return Decisions(
        policy="test",
        precision=Precision(weights=dtype),
        micro_batch=4,
        subgroup_params=SUBGROUP_PARAMS,
        clip=True,
        units=chosen,
    )


@pytest.mark.part(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OWN)
@given(data=st.data())
@settings(max_examples=examples(6, fewest=4))
def test_training_is_the_same_bit_for_bit(name: str, dtype: str, data: st.DataObject) -> None:
    found = units_of(name, dtype)
    decisions = data.draw(decided(found, dtype))
    model, given_optimizer = make(name, dtype)
    options = Options(num_threads=1, storage_dir=Path(FOLDER.name) / str(next(NUMBERS)))
    model, optimizer = prepare_session(model, given_optimizer, found, decisions, options)
    with optimizer.session:
        seen = train(name, dtype, model, optimizer)
        final = {path: weight.clone() for path, weight in optimizer.session.full_parameters().items()}
    expected, expected_weights = reference(name, dtype)
    assert seen == expected
    assert final.keys() == expected_weights.keys()
    assert not [path for path in final if not torch.equal(final[path], expected_weights[path])]


@pytest.mark.part(2)
@pytest.mark.parametrize("name", OWN)
def test_offloaded_activations_are_those_that_were_counted(name: str) -> None:
    """To the byte, unit by unit, whatever the model is made of."""
    found = units_of(name, "bf16")
    chosen = {}
    for segment in segments(found):
        way = "offload" if all(unit.recompute for unit in segment) else "keep"
        for unit in segment:
            count = -(-unit.num_params // SUBGROUP_PARAMS)
            chosen[unit.name] = UnitDecision(params="gpu", activations=way, update=(Place.GPU,) * count)
    decisions = Decisions(policy="test", micro_batch=4, subgroup_params=SUBGROUP_PARAMS, units=chosen)
    model, given_optimizer = make(name, "bf16")
    model, optimizer = prepare_session(model, given_optimizer, found, decisions, Options(num_threads=1))
    moved = {}
    with optimizer.session as session:
        activations = session.runtime.offloaded
        leave = activations.offload

        def watched(unit: str, tile: int) -> None:
            leave(unit, tile)
            moved[unit] = sum(tensor.num_bytes for tensor in activations._segments[unit].offloaded(unit))
            if name == "residual":  # copies of two norms' statistics are counted with the input, but stay
                moved[unit] += 2 * (2 * 16 * 2 + 8)

        activations.offload = watched
        args, kwargs = batch(name, torch.bfloat16, seed=0)
        find_loss(model(*args, **kwargs))[0].backward()
        optimizer.step()
        assert moved == {task.unit: task.num_bytes for task in session.schedule.tasks if task.op is Op.OFFLOAD}


def train_with_parts(model: torch.nn.Module, optimizer) -> list[float]:
    """Reach parts that the example batch does not: not, inside the model's forward, and before it."""
    seen = []
    for iteration in range(ITERATIONS):
        (x,), image = batch("unused", torch.float32, seed=iteration)
        loss = model(x + model.image(x) if iteration == 2 else x, **image).square().mean()
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_parts_that_the_batch_does_not_reach_come_on_demand(where: str) -> None:
    found = units_of("unused", "fp32")
    update = (Place.NVME if where == "nvme" else Place.CPU,)
    assert max(unit.num_params for unit in found) <= SUBGROUP_PARAMS
    decisions = Decisions(
        policy="test",
        precision=Precision(weights="fp32"),
        micro_batch=4,
        subgroup_params=SUBGROUP_PARAMS,
        clip=True,
        num_param_slots=1,
        units={unit.name: UnitDecision(params=where, activations="keep", update=update) for unit in found},
    )
    plain, plain_optimizer = make("unused", "fp32")
    expected = train_with_parts(plain, ReferenceOptimizer(plain_optimizer))
    options = Options(num_threads=1, storage_dir=Path(FOLDER.name) / str(next(NUMBERS)))
    model, optimizer = prepare_session(*make("unused", "fp32"), found, decisions, options)
    with optimizer.session as session:
        assert train_with_parts(model, optimizer) == expected
        assert session.num_left == 2
        final = session.full_parameters()
        assert not [path for path, weight in weights(plain).items() if not torch.equal(final[path], weight)]
