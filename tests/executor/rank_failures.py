"""What ranks run that fail, differ from each other, or see less than others."""

import contextlib
import dataclasses
import errno
import functools
import os
import signal
import time
from unittest import mock

import torch
import torch.distributed as dist
from rank_programs import resumed, saved, trained
from training import (
    Task,
    batches,
    make_model,
    make_optimizer,
    prepare,
    session_options,
    train,
    units_of,
)

import ullage
from executor.checkpoint.files.system_calls import DamagedError, Files
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.levels import Level
from executor.distributed import meeting, ranks
from executor.prepare import prepare_session
from executor.tasks.actions import Actions
from executor.training_state.saving import Checkpoints
from executor.weights.saving import save
from planner.decisions import Decisions
from planner.schedule.tasks import Op


class FullDrive(Files):
    """A drive without room."""

    def allocate(self, _fd, _num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed(rank: int, size: int, task: Task, decisions: Decisions, folder):
    """Train as ``saved``, until the third backward scatters a gradient and there is a checkpoint: then be killed."""
    perform = Actions.perform

    def killing(self, task_, iteration):
        if iteration == 2 and task_.op is Op.SCATTER:
            while not list(folder.glob("step-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        perform(self, task_, iteration)

    Actions.perform = killing
    saved(rank, size, task, decisions, folder)


def failed(rank: int, _size: int, task: Task, decisions: Decisions, moment: str) -> None:
    """Train, until something happens to rank 1."""
    victim = rank == 1
    model, optimizer = prepare(task, decisions, gpu_capacity_bytes=1000 if victim and moment == "prepare" else None)
    with optimizer.session as session:
        perform = session.runtime.machine._perform

        def failing(task_, iteration: int) -> None:
            if iteration == 2 and task_.op == moment:
                raise FloatingPointError("a broken cable")
            if iteration == 2 and moment == "kill" and task_.op is Op.SCATTER:
                os.kill(os.getpid(), signal.SIGKILL)
            perform(task_, iteration)

        def in_the_loop(iteration: int) -> None:
            if iteration == 2 and moment == "forward":
                raise ZeroDivisionError("in the loop")
            if iteration == 2 and moment == "kill in the loop":
                os.kill(os.getpid(), signal.SIGKILL)

        if victim:
            session.runtime.machine._perform = failing
        rank //= decisions.tensor_parallel
        train(task, model, optimizer, rank=rank, before_step=in_the_loop if victim else None)


def without_a_gradient(rank: int, _size: int, task: Task, decisions: Decisions):
    """Train where one parameter gets a gradient on rank 0 only, and another on no rank."""
    model, optimizer = prepare(task, decisions)
    first, second = model.transformer.h[0].mlp.c_fc, model.transformer.h[1].mlp.c_fc
    second.bias.requires_grad_(False)
    forward = first.forward
    if rank:
        first.forward = lambda x: torch.nn.functional.linear(x, first.weight.t(), first.bias.detach())
    with optimizer.session as session:
        seen = train(task, model, optimizer, rank=rank)
        first.forward = forward
        final = {n: w.clone().view(torch.uint8).numpy() for n, w in session.full_parameters().items()}
        steps = {name: entry.step for name, (_, entry) in session.runtime.parameter_states().items()}
    return seen, final, steps


def with_a_loss_of_its_own(rank: int, _size: int, task: Task, decisions: Decisions) -> float:
    """Train a step with a loss made outside the model; return the gradients' norm."""
    model, optimizer = prepare(task, decisions)
    tokens = batches(task, rank // decisions.tensor_parallel)[0, 0]
    with optimizer.session:
        logits = model(input_ids=tokens).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        norm = float(optimizer.clip_grad_norm_(task.max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norm


def with_a_loss_of(_rank: int, _size: int, task: Task, decisions: Decisions, factor: float) -> float:
    """Go forward and backward with a multiple of the loss; return the gradients' norm."""
    model, optimizer = prepare(task, decisions)
    tokens = batches(task)[0, 0]
    with optimizer.session:
        (factor * model(input_ids=tokens, labels=tokens).loss).backward()
        norm = float(optimizer.clip_grad_norm_(task.max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norm


def with_something_of_its_own(rank: int, _size: int, task: Task, decisions: Decisions, what: str) -> float:
    """Train with other batches, or other random numbers, than ranks that share layers; return the first one drawn."""
    model = make_model(task)
    torch.manual_seed(rank)
    model, optimizer = prepare(task, decisions, model=model)
    drawn = float(torch.rand(()))
    with optimizer.session:
        if what == "random":
            model.register_forward_pre_hook(lambda *_: torch.manual_seed(rank) and None)
        train(task, model, optimizer, rank=rank if what == "batches" else 0)
    return drawn


def with_another_plan(rank: int, _size: int, task: Task, decisions: Decisions) -> None:
    prepare(task, decisions.model_copy(update={"num_param_slots": 2 + rank}))


def with_another_optimizer(rank: int, _size: int, task: Task, decisions: Decisions, what: str) -> None:
    model = make_model(task)
    model.transformer.wpe.requires_grad_(not (rank and what == "frozen"))
    optimizer = make_optimizer(task, model)
    optimizer.param_groups[0]["lr"] *= 1 + (rank and what == "rate")
    if rank and what == "unknown":
        optimizer = torch.optim.Rprop(model.parameters())
    prepare_session(model, optimizer, units_of(task, decisions), decisions, session_options())


@contextlib.contextmanager
def impatient(silence_s: float):
    """Let ranks take others for dead, or elsewhere, after that long."""
    with mock.patch.object(ranks, "Watchdog", functools.partial(ranks.Watchdog, silence_s=silence_s)):
        yield


def first_of(rank: int, _size: int) -> int:
    return rank


def raising_or_waiting(rank: int, _size: int) -> None:
    if rank == 0:
        raise ZeroDivisionError("on its own")
    time.sleep(600)


def losing_handshakes(rank: int, size: int, task: Task, decisions: Decisions, num_lost: int):
    """Train, where rank 1 loses its first connections: of the group of all ranks, and of one of a session."""
    c10d = dist.distributed_c10d
    connect, store, lost = c10d._new_process_group_helper, c10d._get_default_store(), []
    dist.destroy_process_group()

    def losing(*args, **kwargs):
        if rank == 1 and len(lost) < num_lost:
            lost.append("once")
            raise RuntimeError("Gloo connectFullMesh failed with: Connection reset by peer\nand more")
        return connect(*args, **kwargs)

    before, meeting._HANDSHAKE_S, c10d._new_process_group_helper = meeting._HANDSHAKE_S, 0.4, losing
    try:
        meeting.begin(store, rank, size)
        lost.clear()
        return trained(rank, size, task, decisions)
    finally:
        meeting._HANDSHAKE_S, c10d._new_process_group_helper = before, connect


def do_alone(deed: str, model, optimizer) -> None:
    if deed == "state":
        model.state_dict()
    if deed == "branch":
        model.transformer.h[-1].forward = model.transformer.h[0].forward
    if deed == "rate":
        optimizer.param_groups[0]["lr"] *= 0.5


def diverged(rank: int, _size: int, task: Task, decisions: Decisions, deed: str) -> None:
    """Train; rank 0 does something alone."""
    alone = rank == 0
    with impatient(2.0):
        model, optimizer = prepare(task, decisions)

    def before_clip(iteration: int) -> None:
        if alone and iteration == 1 and deed == "norms":
            optimizer.clip_grad_norm_(1.0)

    def before_step(iteration: int) -> None:
        if alone and iteration == 1 and deed == "skip":
            optimizer.zero_grad()

    def after_step(iteration: int) -> None:
        if alone and iteration == 1:
            do_alone(deed, model, optimizer)
        if iteration == 1 and (deed == "one evaluation more" or (alone and deed == "evaluation")):
            model.eval()
            for _ in range(1 + alone):
                model(input_ids=torch.zeros(1, 4, dtype=torch.long))
            model.train()

    iterations = task.iterations - (alone and deed == "batches")
    sizes = (2, 1, 2, 2) if alone and deed == "short group" else ()
    with optimizer.session:
        train(
            dataclasses.replace(task, iterations=iterations, schedule=False, max_norm=None, group_sizes=sizes),
            model,
            optimizer,
            before_clip=before_clip,
            before_step=before_step,
            after_step=after_step,
            rank=rank,
        )


def saved_alone(rank: int, _size: int, task: Task, decisions: Decisions, folder, what: str) -> None:
    """Save something on rank 0, while the others train on."""
    with impatient(2.0):
        model, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
    with optimizer.session, Checkpoints(optimizer, Level(folder)) as checkpoints:
        if rank == 0 and what == "save()":
            save(optimizer, folder / "weights")
        if rank == 0 and what == "checkpoints.save(0)":
            checkpoints.save(0)
        train(task, model, optimizer, rank=rank)


def buffers_of(rank: int, _size: int, task: Task, decisions: Decisions):
    """Return buffers as they are after each rank had its own."""
    model = make_model(task)
    model.register_buffer("features", torch.randn(3, generator=torch.Generator().manual_seed(rank)))
    model.register_buffer("is_set", torch.tensor(rank > 0))
    model, optimizer = prepare(task, decisions, model=model)
    with optimizer.session:
        return model.features.tolist(), bool(model.is_set)


def resumed_where_one_sees_less(rank: int, size: int, task: Task, decisions: Decisions, folder, hidden: str):
    """Do as :func:`resumed`, where rank 1 cannot open one of the checkpoints."""
    opened = Checkpoint.__init__

    def open_(self, path, *args, **kwargs):
        if rank == 1 and str(path).endswith(hidden):
            raise DamagedError(f"{path}: manifest.json: No such file or directory")
        opened(self, path, *args, **kwargs)

    Checkpoint.__init__ = open_
    try:
        return resumed(rank, size, task, decisions, folder)
    finally:
        Checkpoint.__init__ = opened


def edited_alone(rank: int, _size: int, task: Task, decisions: Decisions, deed: str) -> None:
    """Train a step, in which the last rank does something else with weights or gradients than the others."""
    with impatient(2.0):
        model, optimizer = prepare(task, decisions, audit="first" if deed == "clipping alone" else "off")
    parameter, other = list(model.parameters())[:2]
    with optimizer.session, torch.no_grad():
        if deed == "another write":
            parameter.fill_(rank)
        if deed == "a write to another":
            (other if rank else parameter).zero_()
        if deed == "a write alone" and rank:
            parameter.zero_()
        if deed == "a read alone" and rank:
            parameter.sum()
        with torch.enable_grad():
            model(input_ids=(tokens := batches(task)[0, 0]), labels=tokens).loss.backward()
        if deed == "another gradient":
            parameter.grad = torch.full_like(parameter, rank)
        if deed == "an edit alone" and rank:
            parameter.grad.view(-1)[0] = 0
        if deed == "clipping alone" and rank:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.session.synchronize()
        if deed in {"another state", "a state alone"}:
            set_state(rank, deed, optimizer, parameter)
            with torch.enable_grad():
                model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()


def set_state(rank: int, deed: str, optimizer, parameter) -> None:
    if deed == "another state":
        saved = optimizer.state_dict()
        saved["state"][0]["exp_avg"].fill_(rank)
        optimizer.load_state_dict(saved)
    held = optimizer.state[parameter]["exp_avg"]
    if rank:
        held.zero_()


def with_other_options(rank: int, _size: int) -> None:
    """Prepare with another option than the other rank."""
    model = torch.nn.Linear(8, 8)
    options = {"hardware": "epyc-turin-2c", "device_memory": f"{rank + 1}MB"}
    ullage.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2, 8), **options)


def leaving_checkpoints_early(
    rank: int, _size: int, task: Task, decisions: Decisions, folder, how: str
) -> list[tuple[int, str | None]]:
    """Train on two nodes with folders of their own, of which the second's leader closes before the last iteration.

    Return the outcomes of the first level, after an orderly end or not.
    """
    os.environ["LOCAL_RANK"] = "0"
    outcomes = []
    with impatient(1.0):
        model, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
        levels = Level(folder / "ab"[rank], 1), Level(folder / "shared", 1)
        with optimizer.session, Checkpoints(optimizer, *levels, on_outcome=outcomes.append) as checkpoints:
            for step, tokens in enumerate(batches(task, rank)[:, 0], 1):
                if step == 3 and rank == 1:
                    if how == "raises":
                        raise ZeroDivisionError("in the loop")
                    break
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpoints.save(step)
                checkpoints.settle()
