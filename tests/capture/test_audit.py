"""Audits: what plans compute is compared with plain PyTorch, and what differs stops the training before the step."""

import contextvars
import itertools
import os
import random

import pytest
import torch
from random_modules import BATCH, BLOCKS, INPUT, LENGTH, WIDTH
from torch import nn

from executor.audit.audit import AuditError
from executor.audit.tensors import referred_to
from executor.options import Options
from executor.prepare import prepare_session
from planner.decisions import FP32, Activations, Decisions, Place, UnitDecision
from planner.graph import Batch, build_graph, units
from ullage.capture import capture_module

CALLS = itertools.count(1)


class Drawing(nn.Module):
    """Computes with what an iterator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x * (1 + next(CALLS) / 8)))


class Routed(nn.Module):
    """Has a module inside whose output a hook collects for a loss of its own, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router.register_forward_hook(lambda _module, _args, output: COLLECTED.get().append(output))

    def forward(self, x):
        return self.linear(x) * self.router(x).sigmoid()


COLLECTED: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("collected")  # as in transformers
COLLECTED.set([])


class Net(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def prepared(make, activations: Activations = "recompute", audit="first", micro_batches=1, place="cpu", **decided):
    torch.manual_seed(7)
    found = capture_module(lambda: Net(make), [INPUT], "fp32", as_on_gpu=False)
    its_units = units(build_graph(found, Batch(found.micro_batch, found.seq_len, 4)))
    chosen = {
        unit.name: UnitDecision(
            params="gpu" if place == "gpu" else "host",
            activations=activations if unit.recompute else "keep",
            update=(Place(place),),
        )
        for unit in its_units
    }
    decisions = Decisions(
        **{
            "policy": "test",
            "precision": FP32,
            "micro_batch": BATCH,
            "subgroup_params": 10**6,
            "num_param_slots": 1,
            "num_micro_batches": micro_batches,
            "clip": True,
            "units": chosen,
            **decided,
        }
    )
    model = Net(make).train()
    lines: list[str] = []
    options = Options(num_threads=1, audit=audit, report=lines.append)
    model, optimizer = prepare_session(model, torch.optim.AdamW(model.parameters()), its_units, decisions, options)
    return model, optimizer, lines


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_what_a_hook_takes_from_inside_a_module_is_another_output(activations: Activations) -> None:
    model, optimizer, lines = prepared(Routed, activations)
    with optimizer.session:
        COLLECTED.get().clear()
        loss = model(torch.randn(BATCH, LENGTH, WIDTH))
        (loss + sum(logits.square().mean() for logits in COLLECTED.get())).backward()
        COLLECTED.get().clear()
        optimizer.step()
        assert optimizer.session.audit.result.kinds == ("first", "blocks.2", "last")
    assert "bit for bit (" in lines[0]


def test_later_micro_batches_take_no_weight_from_what_is_compared() -> None:
    model, optimizer, _ = prepared(Routed, micro_batches=2)
    with optimizer.session as session:
        before = {case.path: case.exclusive for case in session.audit._all}
        for _ in range(2):
            model(torch.randn(BATCH, LENGTH, WIDTH)).backward()
        assert {case.path: case.exclusive for case in session.audit._all} == before
        assert all(before.values())
        COLLECTED.get().clear()


def step(model, optimizer, micro_batches=1) -> None:
    for _ in range(micro_batches):
        model(torch.randn(BATCH, LENGTH, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("place", "clip", "update_start"),
    [("cpu", True, "step"), ("cpu", False, "step"), ("gpu", False, "step"), ("cpu", False, "backward")],
)
def test_one_module_of_each_kind_is_audited_once_by_default(micro_batches: int, place, clip, update_start) -> None:
    model, optimizer, lines = prepared(
        BLOCKS["linear-gelu"], place=place, micro_batches=micro_batches, clip=clip, update_start=update_start
    )
    with optimizer.session:
        for _ in range(3):
            step(model, optimizer, micro_batches)
        assert optimizer.session.audit.result.kinds == ("first", "blocks.2", "last")
    assert len(lines) == 1
    assert lines[0].startswith(
        "audit: 3 kinds of modules, 3 recomputations: outputs and gradients are plain PyTorch's, bit for bit ("
    )
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("audit", "iterations"), [("off", 0), (2, 2), (1, 4)])
def test_audits_are_repeated_as_often_as_wanted(audit, iterations: int) -> None:
    model, optimizer, lines = prepared(BLOCKS["linear-gelu"], audit=audit)
    with optimizer.session:
        for _ in range(4):
            step(model, optimizer)
    assert len(lines) == iterations


def test_modules_that_do_not_fit_together_are_audited_one_after_the_other(monkeypatch) -> None:
    monkeypatch.setattr("executor.audit.audit.MOST_BYTES", 1)
    model, optimizer, lines = prepared(BLOCKS["linear-gelu-linear"])
    with optimizer.session:
        for _ in range(2):
            step(model, optimizer)
            assert optimizer.session.audit.result is None
        step(model, optimizer)
        assert len(optimizer.session.audit.result.kinds) == 3
    assert len(lines) == 1


@pytest.mark.parametrize(("update_start", "place"), [("step", "cpu"), ("backward", "cpu"), ("backward", "gpu")])
def test_a_second_pass_that_differs_stops_training_before_weights_change(update_start, place: str) -> None:
    model, optimizer, _ = prepared(Drawing, place=place, update_start=update_start, clip=update_start == "step")
    with pytest.raises(AuditError) as raised, optimizer.session:
        before = {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}
        step(model, optimizer)
    assert "the output of blocks.2.linear when blocks.2 is recomputed differs" in str(raised.value)
    assert "an iterator" in str(raised.value)
    assert "no weight has changed" in str(raised.value)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_weights_that_were_not_those_of_the_plan_are_noticed(monkeypatch) -> None:
    """Whatever the schedule brings is compared with what the session keeps."""
    model, optimizer, _ = prepared(BLOCKS["linear-gelu"], "keep")
    actions = optimizer.session.runtime.actions
    fetch = actions.fetch

    def old(unit) -> None:
        fetch(unit)
        if unit.name == "blocks.2.0":
            unit.device_weights[:8] *= 2

    monkeypatch.setattr(type(actions), "fetch", lambda _self, unit: old(unit))
    with pytest.raises(AuditError, match=r"the output of blocks\.2 differs from plain PyTorch's by"), optimizer.session:
        step(model, optimizer)


def test_gradients_that_updates_would_read_are_those_that_arrived(monkeypatch) -> None:
    model, optimizer, _ = prepared(BLOCKS["linear-gelu"], micro_batches=2)
    backend = optimizer.session.runtime.backend
    monkeypatch.setattr(type(backend), "accumulate", lambda _self, sums, _team: [a.copy_(b) for a, b in sums])
    with pytest.raises(AuditError, match=r"the gradient of .* that its update reads differs"), optimizer.session:
        step(model, optimizer, 2)


def test_a_module_that_cannot_be_run_again_is_left_out_with_the_reason(monkeypatch) -> None:
    class Once(nn.Linear):
        """Fails outside of training's own forward."""

        def forward(self, x):
            if "ARMED" in os.environ:
                raise RuntimeError("once only")
            return super().forward(x)

    model, optimizer, lines = prepared(lambda: Once(WIDTH, WIDTH), "keep")
    with optimizer.session:
        model(torch.randn(BATCH, LENGTH, WIDTH)).backward()
        monkeypatch.setenv("ARMED", "yes")
        optimizer.step()
    assert lines[0].startswith("audit: 2 kinds of modules: outputs and gradients are plain PyTorch's, bit for bit; ")
    assert "1 left out (blocks.2: it cannot be run again: RuntimeError: once only)" in lines[0]


def test_what_forward_draws_and_keeps_is_as_without_an_audit() -> None:
    seen = []
    for audit in ("off", 1):
        random.seed(3)
        model, optimizer, _ = prepared(BLOCKS["running"], audit=audit)
        torch.manual_seed(3)
        with optimizer.session:
            for _ in range(3):
                step(model, optimizer)
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        seen.append(buffers | dict(model.named_parameters()) | {"random": torch.rand(4)})
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_to_count_references_saves_nothing_that_a_checkpoint_would_count() -> None:
    saved = []
    held = [torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True) * 1]
    kept = held[1]
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda values: values):
        assert referred_to(held) == [1]
    assert kept.requires_grad
    assert saved == []


class _Noisy(torch.autograd.Function):
    """Adds noise to gradients."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient + torch.randn(gradient.shape)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return _Noisy.apply(self.linear(x))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradients_of_a_backward_that_draws_are_left_out(activations: Activations) -> None:
    model, optimizer, _ = prepared(Noisy, activations)
    with optimizer.session:
        step(model, optimizer)
        assert list(optimizer.session.audit.result.left_out.values()) == [
            "its backward draws random numbers or changes what it computes with"
        ]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradients_of_activations_that_hooks_compress_are_left_out(activations: Activations) -> None:
    """Where the plan recomputes, the iteration leaves it, and is not audited."""
    model, optimizer, _ = prepared(BLOCKS["linear-gelu"], activations)
    with optimizer.session:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 0.75, lambda kept: kept):
            step(model, optimizer)
        assert optimizer.session.num_left == (activations == "recompute")
        assert len(optimizer.session.audit.result.left_out if activations == "keep" else ["it left"] * 3) == 3


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_hooks_on_gradients_run_once(activations: Activations) -> None:
    model, optimizer, _ = prepared(BLOCKS["linear-gelu"], activations)
    seen: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient) or gradient * len(seen))
    with optimizer.session:
        step(model, optimizer)
        assert len(seen) == len(list(model.parameters()))
        assert optimizer.session.audit.result.largest < 1e-6


def test_one_copy_that_autocast_makes_of_weights_serves_all_calls() -> None:
    """Its gradient is that of all calls, of which an audit runs one."""
    torch.manual_seed(7)
    block = BLOCKS["linear-gelu"]()
    model, optimizer, _ = prepared(lambda: block, "keep")
    with optimizer.session:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(BATCH, LENGTH, WIDTH))
        loss.backward()
        optimizer.step()
        result = optimizer.session.audit.result
        assert result.left_out == {"blocks.0": "autocast makes one copy of its weights for all its calls"}
        assert result.largest < 6e-2
