"""The loop of ``ullage execute``."""

import contextlib
import gc
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ullage
from executor.memory.arenas import MeasuredMemory
from executor.prepare import OffloadedOptimizer
from hwprofiles.profile import FOR_LIBRARIES_BYTES
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.schedule.tasks import Tier
from ullage.training.batches import Batches
from ullage.training.loop import Step, train
from ullage.training.models import prepared
from ullage.training.out_of_memory import OutOfMemoryError, check_device, warning_of_retries
from ullage.training.text import Tokens, sequences, windows

SEQ_LEN = 32


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = resolve_model("demo-llama").model_copy(update={"num_layers": 2})
    hardware = load_profile("epyc-turin-2c").with_device_memory(60_000_000)
    return make_plan(Request(model, hardware, seq_len=SEQ_LEN, micro_batch=2, num_micro_batches=2))


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return np.random.default_rng(0).integers(0, 200, SEQ_LEN * 40).astype(np.uint16)


@contextlib.contextmanager
def made(
    plan: Plan, tokens: Tokens, end: int, *, position: int = 0, lr: float = 1e-3, seed: int = 0
) -> Iterator[tuple[torch.nn.Module, OffloadedOptimizer, Batches, Iterator[Step]]]:
    """Yield what the command trains, and its loop."""
    model, optimizer = prepared(plan, lr=lr, seed=seed, weights=None, options={})
    batches = Batches(plan, tokens, seed)
    batches.position = position
    with optimizer.session:
        yield model, optimizer, batches, train(model, optimizer, batches, 0, end)


def test_it_trains_as_a_loop_around_prepare_does(plan: Plan, tokens: Tokens) -> None:
    """Bit for bit: the same sequences, the same rates, the same clipping, the same order."""
    with made(plan, tokens, 8, seed=5) as (_, optimizer, batches, steps):
        start = {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}
        found = [step.loss for step in itertools.islice(steps, 7)]
        assert batches.position == 7 * 4

    with made(plan, tokens, 1, seed=5) as (model, other, _, _):  # of the same weights, to be trained by hand
        for name, weight in other.session.full_parameters().items():
            assert torch.equal(weight, start[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 5, 1) * 0.5 * (1 + math.cos(math.pi * i / 8))
    )
    model, prepared_one = ullage.prepare(model, optimizer, plan)
    there, expected = windows(tokens, SEQ_LEN), []
    with prepared_one.session:
        for i in range(7):
            total = torch.zeros(())
            for position in (4 * i, 4 * i + 2):
                batch = sequences(there, position, 2, seed=5)
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss / 2
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            prepared_one.step()
            prepared_one.zero_grad()
            scheduler.step()
            expected.append(float(total))
    assert found == expected


class Listener(torch.nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.heard: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        self.heard += input_ids.tolist()
        return SimpleNamespace(loss=input_ids.sum())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_shares_the_same_batches(plan: Plan, tokens: Tokens, num_ranks: int) -> None:
    """Each micro-batch of all ranks together is the next piece of one order, and each rank takes its own part."""

    shared = plan.decisions.model_copy(
        update={"data_parallel": num_ranks, "micro_batch": 4 // num_ranks, "num_micro_batches": 1}
    )
    feeds = [Batches(plan.model_copy(update={"decisions": shared}), tokens, 7, rank) for rank in range(num_ranks)]
    listener = Listener()
    for batches in feeds:
        batches.position = 3
    for _ in range(11):
        for batches in feeds:
            list(batches.losses(listener))
    assert listener.heard == sequences(windows(tokens, SEQ_LEN), 3, 44, seed=7).tolist()
    assert {batches.position for batches in feeds} == {47}


def test_a_token_that_the_model_does_not_know_is_named(plan: Plan, tokens: Tokens) -> None:
    with (
        made(plan, tokens.astype(np.uint32) + 70_000, 1) as (*_, steps),
        pytest.raises(ValueError, match="but the model knows tokens 0 to"),
    ):
        next(steps)


def test_memory_that_runs_out_on_the_way_is_reported_with_its_ledger(
    plan: Plan, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the allocators say it: of the device, and of the host."""
    with made(plan, tokens, 1) as (model, optimizer, batches, _):
        for error, tier in ((torch.OutOfMemoryError("CUDA out of memory. Tried"), "gpu"), (MemoryError(), "host")):

            def compute(*_: object, error: Exception = error) -> torch.Tensor:
                raise error

            monkeypatch.setattr(ullage.training.loop, "_compute", compute)
            with pytest.raises(OutOfMemoryError) as caught:
                next(train(model, optimizer, batches, 0, 1))
            report = caught.value
            assert report.tier == tier
            actual = {name: n for name, n in report.actual_bytes.items() if "activations" not in name}
            assert actual == {str(c): n for c, n in optimizer.session.memory()[report.tier].static_bytes.items()}
            assert report.remedy


@pytest.mark.parametrize(
    ("kind", "held_bytes", "reserved_bytes", "message"),
    [
        ("host", 60_000_000, 0, ""),
        ("host", 60_000_001, 0, r"the device holds 60.0 MB at its peak, .* --memory device=33MB`"),
        ("gpu", 60_000_001, 0, r"the device holds 60.0 MB at its peak, .* --memory device=1107MB`"),
        ("gpu", 60_000_000, FOR_LIBRARIES_BYTES + 60_000_000, ""),
        ("gpu", 60_000_000, FOR_LIBRARIES_BYTES + 60_000_001, "PyTorch has reserved 1.1. GB of the device, but"),
    ],
)
def test_a_device_that_holds_more_than_planned_is_told(
    plan: Plan, kind: str, held_bytes: int, reserved_bytes: int, message: str
) -> None:
    """A host in place of a device ends training; a GPU goes on while it has the memory."""
    device = plan.hardware.device.model_copy(update={"kind": kind})
    plan = plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"device": device})})
    use = MeasuredMemory({}, held_bytes, allocator={"reserved_bytes.all.peak": reserved_bytes})
    if not message:
        check_device(plan, use)
    elif kind == "gpu":
        with pytest.warns(RuntimeWarning, match=message):
            check_device(plan, use)
    else:
        with pytest.raises(OutOfMemoryError, match=message):
            check_device(plan, use)


def test_a_full_allocator_is_told_once() -> None:
    assert not warning_of_retries({})
    assert not warning_of_retries({"num_alloc_retries": 0})
    assert "memory was full 3 x after the first iterations" in warning_of_retries({"num_alloc_retries": 3})


def test_memory_of_times_is_bounded(plan: Plan, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session records for whoever plans again, and keeps what that reads."""
    monkeypatch.setattr("executor.devices.lanes.NUM_RECORDED", 6)

    def num_tickets() -> int:
        return sum(type(found).__name__ == "_Ticket" for found in gc.get_objects())

    gc.collect()
    before = num_tickets()  # what other tests have left
    with made(plan, tokens, 10) as (_, optimizer, _, steps):
        num_tasks = len(optimizer.session.schedule.tasks)
        for step in steps:
            optimizer.session.synchronize()  # a thread that makes a tuple minds that others see it
            if step.iteration in {7, 9}:  # to look through all objects takes long
                assert num_tickets() - before <= (6 + 2) * num_tasks
        assert optimizer.session.timeline().num_iterations == 6
        assert ullage.replan(optimizer).refit.measured_s > 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_training_ends_where_the_loss_is_not_finite(
    plan: Plan, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    """And names the rate as it was given."""
    with made(plan, tokens, 9, lr=0.25) as (*_, steps):
        next(steps)
        monkeypatch.setattr(ullage.training.loop, "_compute", lambda *_: torch.tensor(loss))
        with pytest.raises(ValueError, match=rf"the loss is {loss} in iteration 1; use a smaller --lr than 0\.25"):
            next(steps)


@pytest.mark.part(2)
@pytest.mark.parametrize(("num_too_much", "ends"), [(0, False), (2, False), (3, True)])
def test_memory_of_ranks_is_too_much_if_it_is_so_three_times(
    plan: Plan, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, num_too_much: int, *, ends: bool
) -> None:
    """Threads that add up may be late to give a tensor up; what one process holds is its own, and looked at once."""
    looked: list[int] = []

    def check(*_args: object) -> None:
        looked.append(optimizer.session.iteration)
        if len(looked) <= num_too_much:
            raise OutOfMemoryError(Tier.GPU, "", {}, {}, 0)

    monkeypatch.setattr(ullage.training.loop, "check_device", check)
    with made(plan, tokens, 6) as (_, optimizer, _, steps):
        two = plan.decisions.model_copy(update={"data_parallel": 2, "zero_stage": 1})
        optimizer.plan = plan.model_copy(update={"decisions": two})
        with pytest.raises(OutOfMemoryError) if ends else contextlib.nullcontext():
            list(steps)
    assert looked == list(range(2, 3 + min(num_too_much, 2)))
