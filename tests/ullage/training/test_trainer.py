"""``ullage.Trainer``: the loop that is there."""

import contextlib
import gc
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ullage
from executor.checkpoint import CheckpointError, Level
from executor.memory.arenas import MeasuredMemory
from executor.prepare import OffloadedOptimizer
from hwprofiles.profile import FOR_LIBRARIES_BYTES
from hwprofiles.registry import load_profile
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import Request, make_plan
from ullage.training.batches import batch_source
from ullage.training.checkpoints import CheckpointOptions, CheckpointSaver
from ullage.training.out_of_memory import OutOfMemoryError, check_device, warning_of_retries
from ullage.training.text import Tokens, TokenStream

SEQ_LEN = 32


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = resolve_model("demo-llama").model_copy(update={"num_layers": 2})
    hardware = load_profile("epyc-turin-2c").with_device_memory(60_000_000)
    return make_plan(Request(model, hardware, seq_len=SEQ_LEN, micro_batch=2, num_micro_batches=2))


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return np.random.default_rng(0).integers(0, 200, SEQ_LEN * 40).astype(np.uint16)


def test_it_trains_as_a_loop_around_prepare_does(plan: Plan, tokens: Tokens) -> None:
    """Bit for bit: the same sequences, the same clipping, the same order."""

    with ullage.Trainer(plan, data=tokens, lr=1e-3, seed=5) as trainer:
        start = {name: weight.clone() for name, weight in trainer.session.full_parameters().items()}
        found = [step.loss for step in trainer.run(3)]
        found += [step.loss for step in itertools.islice(trainer, 1)]  # it goes on
        assert trainer.position == 4 * 4

    with ullage.Trainer(plan, data=tokens, seed=5) as other:  # of the same weights, to be trained by hand
        model = other.model
        for name, weight in other.session.full_parameters().items():
            assert torch.equal(weight, start[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model, prepared = ullage.prepare(model, optimizer, plan)
    stream, expected = TokenStream(tokens, SEQ_LEN, 5), []
    with prepared.session:
        for _ in range(4):
            total = torch.zeros(())
            for _ in range(2):
                batch = stream.next(2)
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss / 2
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            expected.append(float(total))
    assert found == expected


def test_a_given_model_and_optimizer_go_on_at_a_position(plan: Plan, tokens: Tokens) -> None:
    with ullage.Trainer(plan, data=tokens) as trainer:
        whole = [step.loss for step in trainer.run(4)]
    with ullage.Trainer(plan, data=tokens) as trainer:
        begun = [step.loss for step in trainer.run(2)]
        state, position = trainer.optimizer.state_dict(), trainer.position
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    with ullage.Trainer(plan, trainer.model, optimizer, tokens, position=position) as resumed:
        resumed.optimizer.load_state_dict(state)
        rest = [(step.iteration, step.loss, step.measured_s > 0) for step in resumed.run(2)]
    assert [*begun, *(loss for _, loss, _ in rest)] == whole
    assert [(iteration, timed) for iteration, _, timed in rest] == [(0, True), (1, True)]


class Listener(torch.nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        self.heard += input_ids.tolist()
        return SimpleNamespace(loss=input_ids.sum())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_shares_the_same_batches(plan: Plan, tokens: Tokens, num_ranks: int) -> None:
    """Each micro-batch of all ranks together is the next piece of one order, and each rank takes its own part."""

    shared = plan.decisions.model_copy(update={"data_parallel": num_ranks, "micro_batch": 4 // num_ranks})
    feeds = [
        batch_source(plan.model_copy(update={"decisions": shared}), tokens, 7, 3, rank) for rank in range(num_ranks)
    ]
    listener = Listener()
    for _ in range(11):
        for batches in feeds:
            batches.loss(listener, torch.device("cpu"))
    stream = TokenStream(tokens, SEQ_LEN, 7)
    stream.next(3)
    assert listener.heard == stream.next(44).tolist()
    assert {batches.sequences.position for batches in feeds} == {stream.position} == {47}


def test_bad_input(plan: Plan, tokens: Tokens) -> None:
    stray = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="without its model"):
        ullage.Trainer(plan, optimizer=stray)
    with pytest.raises(ValueError, match="position is -1"):
        ullage.Trainer(plan, data=tokens, position=-1)
    unknown = ullage.Trainer(plan, data=tokens.astype(np.uint32) + 70_000)
    with unknown, pytest.raises(ValueError, match="but the model knows tokens 0 to"):
        next(iter(unknown))


def test_a_rate_that_is_too_large_is_named_as_it_was_given(plan: Plan, tokens: Tokens) -> None:
    with ullage.Trainer(plan, data=tokens, lr=1e30) as trainer:
        scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _iteration: 0.5)
        with pytest.raises(ValueError, match=r"use a smaller --lr than 1e\+30"):
            for _ in trainer.run(4):
                scheduler.step()


def test_memory_that_runs_out_on_the_way_is_reported_with_its_ledger(
    plan: Plan, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the allocators say it: of the device, and of the host."""

    with ullage.Trainer(plan, data=tokens) as trainer:
        for error, tier in ((torch.OutOfMemoryError("CUDA out of memory. Tried"), "gpu"), (MemoryError(), "host")):

            def compute(error: Exception = error) -> torch.Tensor:
                raise error

            monkeypatch.setattr(trainer, "_compute", compute)
            with pytest.raises(OutOfMemoryError) as caught:
                next(iter(trainer))
            report = caught.value.report
            assert report.tier == tier
            actual = {name: n for name, n in report.actual_bytes.items() if "activations" not in name}
            assert actual == {str(c): n for c, n in trainer.session.memory()[report.tier].static_bytes.items()}
            assert report.remedy


@pytest.mark.parametrize(
    ("kind", "held_bytes", "reserved_bytes", "message"),
    [
        ("host", 60_000_000, 0, ""),
        ("host", 60_000_001, 0, r"the device holds 60.0 MB at its peak, .* --device-memory 35MB`"),
        ("gpu", 60_000_001, 0, r"the device holds 60.0 MB at its peak, .* --device-memory 1108MB`"),
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
    """A trainer records for whoever plans again, and keeps what that reads."""
    monkeypatch.setattr("executor.devices.lanes.NUM_RECORDED", 6)

    def num_tickets() -> int:
        return sum(type(found).__name__ == "_Ticket" for found in gc.get_objects())

    gc.collect()
    before = num_tickets()  # what other tests have left
    with ullage.Trainer(plan, data=tokens) as trainer:
        num_tasks = len(trainer.session.schedule.tasks)
        for iteration, _ in enumerate(trainer.run(10)):
            trainer.session.synchronize()  # a thread that makes a tuple minds that others see it
            if iteration in {7, 9}:  # to look through all objects takes long
                assert num_tickets() - before <= (6 + 2) * num_tasks
        assert trainer.session.timeline().num_iterations == 6
        assert trainer.replan().refit.measured_s > 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_training_ends_where_the_loss_is_not_finite(
    plan: Plan, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    with ullage.Trainer(plan, data=tokens, lr=0.25) as trainer:
        next(iter(trainer))
        monkeypatch.setattr(trainer, "_compute", lambda: torch.tensor(loss))
        with pytest.raises(ValueError, match=rf"the loss is {loss} in iteration 1; use a smaller --lr than 0\.25"):
            next(iter(trainer))
        assert trainer.iteration == 1


def test_what_fails_after_the_model_was_prepared_ends_the_session(
    plan: Plan, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tells other ranks why, where there are any: they would take this one for killed."""
    sessions = []

    def fails(_self: object, optimizer: OffloadedOptimizer) -> None:
        sessions.append(optimizer.session)
        raise CheckpointError("there is no room")

    monkeypatch.setattr(CheckpointSaver, "open", fails)
    with pytest.raises(CheckpointError, match="there is no room"):
        ullage.Trainer(plan, data=tokens, checkpoints=CheckpointOptions([Level(tmp_path)]))
    assert [session.closed for session in sessions] == [True]


@pytest.mark.part(2)
@pytest.mark.parametrize(("num_too_much", "ends"), [(0, False), (2, False), (3, True)])
def test_memory_of_ranks_is_too_much_if_it_is_so_three_times(
    plan: Plan, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, num_too_much: int, *, ends: bool
) -> None:
    """Threads that add up may be late to give a tensor up; what one process holds is its own, and looked at once."""
    looked: list[int] = []

    def check(*_args: object) -> None:
        looked.append(trainer.iteration)
        if len(looked) <= num_too_much:
            raise OutOfMemoryError(SimpleNamespace(what="", remedy=""))

    monkeypatch.setattr(ullage.training.trainer, "check_device", check)
    with ullage.Trainer(plan, data=tokens) as trainer:
        trainer.plan = plan.model_copy(
            update={"decisions": plan.decisions.model_copy(update={"data_parallel": 2, "zero_stage": 1})}
        )
        with pytest.raises(OutOfMemoryError) if ends else contextlib.nullcontext():
            list(trainer.run(6))
    assert looked == list(range(1, 2 + min(num_too_much, 2)))
