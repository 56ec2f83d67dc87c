"""What ranks run that train: all of it is called in another process, which finds it by its name."""

import contextlib
import dataclasses
import hashlib
import os
import re
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training
import transformers
from edits import EDITS
from programs import blocks, run
from training import (
    CONFIGS,
    MICRO_BATCH,
    SEQ_LEN,
    ReferenceOptimizer,
    Task,
    batches,
    decide,
    delay,
    groups,
    make_model,
    make_optimizer,
    memory_of_step,
    prepare,
    session_options,
    train,
    uniform,
    units_of,
)
from virtual.watch import watched

import ullage
from executor.audit.audit import AuditError
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.levels import Level
from executor.distributed.ranks import Ranks
from executor.distributed.watchdog import RankError
from executor.memory.arenas import DeviceMemoryError
from executor.memory.nvme_files import StorageError
from executor.prepare import prepare_session
from executor.tasks.updates import UpdateTasks
from executor.training_state.restoring import restore
from executor.training_state.saving import Checkpoints
from executor.weights.loading import load
from executor.weights.saving import save
from planner.decisions import Decisions
from planner.graph import Batch, Unit, build_graph, units
from planner.models import from_hf_config
from planner.schedule.tasks import Lane, Op, Tier

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def trained(rank: int, _size: int, task: Task, decisions: Decisions, delays: int | None = None, frozen=()):
    """Train under decisions, from rank 0's weights; return losses and norms, and the final weights."""
    model = freeze(make_model(task), frozen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    model, optimizer = prepare(task, decisions, model=model)
    with optimizer.session:
        if delays is not None:
            delay(optimizer.session, delays + rank)
        seen = train(task, model, optimizer, rank=rank // decisions.tensor_parallel // decisions.context_parallel)
        final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    return seen, {n: w.view(torch.uint8).numpy() for n, w in final.items()}


def audited(rank: int, _size: int, task: Task, decisions: Decisions, spoilt: str = ""):
    """Audit the first step; return the kinds, what was left out, and what differed.

    A gradient whose name has ``spoilt`` in it is wrong when it arrives.
    """
    model, optimizer = prepare(task, decisions, audit="first")
    with contextlib.suppress(AuditError), optimizer.session:
        audit = optimizer.session.audit
        collect = audit.collect
        if spoilt:
            audit.collect = lambda shard, gradient: collect(shard, gradient * (1 + (spoilt in shard.name)))
        train(task, model, optimizer, rank=rank // decisions.tensor_parallel // decisions.context_parallel)
    return audit.result.kinds, dict(audit.result.left_out), audit._difference


def average(model, size: int) -> None:
    """Average gradients as data-parallel ranks do."""
    for parameter in model.parameters():
        there = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(there)
        if there:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient / size


def ran(rank: int, size: int, program, task: Task, decisions: Decisions):
    """Run a program that leaves the plan; return what it sees, and how far that is from training in memory."""
    plain = make_model(task)
    tokens = batches(task, rank // decisions.tensor_parallel // decisions.context_parallel)
    expected = run(
        program,
        plain,
        ReferenceOptimizer(make_optimizer(task, plain)),
        tokens,
        task.max_norm,
        lambda: average(plain, size),
    )
    model, optimizer = prepare(task, decisions)
    with optimizer.session as session:
        found = run(program, model, optimizer, tokens, task.max_norm)
        final = session.full_parameters()
        off = max(float((final[name] - weight.detach()).abs().max()) for name, weight in plain.named_parameters())
    return found, expected, off


class Passing:
    """A module that its loop can pass over."""

    passes = False

    def forward(self, hidden, *args, **kwargs):
        return hidden if self.passes else super().forward(hidden, *args, **kwargs)


class Blocks(torch.nn.ModuleList):
    """Blocks of which a loop can pass over some, which are not called then."""

    def __iter__(self):
        return (block for block in super().__iter__() if not getattr(block, "passes", False))


def _passable(task: Task):
    model = make_model(task)
    for block in blocks(model):
        block.mlp.__class__ = type(type(block.mlp).__name__, (Passing, type(block.mlp)), {})
    blocks(model).__class__ = Blocks
    return model


def passing_over(rank: int, size: int, task: Task, decisions: Decisions):
    """Train where each rank passes over other blocks and MLPs in each step.

    Return the iterations that left the plan, and how far losses and weights are from training in memory.
    """
    plain, tokens = _passable(task), batches(task, rank)[:, 0]

    def train_(model, optimizer, before_clip=lambda: None):
        torch.manual_seed(11)
        losses = []
        for step, batch in enumerate(tokens):
            block = blocks(model)[(step + rank) % 3]
            passed = block if step % 2 else block.mlp
            passed.passes = True
            losses.append(model(input_ids=batch, labels=batch).loss)
            passed.passes = False
            losses[-1].backward()
            before_clip()
            optimizer.clip_grad_norm_(task.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).detach()

    expected = train_(plain, ReferenceOptimizer(make_optimizer(task, plain)), lambda: average(plain, size))
    model, optimizer = prepare(task, decisions, model=_passable(task))
    with optimizer.session as session:
        off = [float((train_(model, optimizer) - expected).abs().max())]
        final = session.full_parameters()
        off += [float((final[name] - weight.detach()).abs().max()) for name, weight in plain.named_parameters()]
        return session.num_left, max(off)


def dropped(rank: int, _size: int, task: Task, decisions: Decisions):
    """Train; return what was dropped of heads and of whole activations, pass by pass, and the losses."""
    model = make_model(task)
    model.set_attn_implementation("eager")  # others drop out where nobody sees it
    model, optimizer = prepare(task, decisions, model=model)
    dropout, found = torch.nn.functional.dropout, {"heads": [], "whole": []}

    def noting(values, *args, **kwargs):
        output = dropout(values, *args, **kwargs)
        found["heads" if values.ndim == 4 else "whole"].append(((output == 0) & (values != 0)).numpy().tobytes())
        return output

    torch.nn.functional.dropout = noting
    try:
        with optimizer.session:
            return found, train(
                task, model, optimizer, rank=rank // decisions.tensor_parallel // decisions.context_parallel
            )
    finally:
        torch.nn.functional.dropout = dropout


def measured(rank: int, _size: int, task: Task, decisions: Decisions):
    """Train with batches of a rank's own shapes; return how many iterations are in its timeline, and in all ranks'."""
    shape = (("input_ids", (MICRO_BATCH, SEQ_LEN)),)
    model, optimizer = prepare(task, decisions, record=True, batch=shape)
    with optimizer.session as session:
        train(task, model, optimizer, rank=rank)
        return session.timeline().num_iterations, session.mean_timeline().num_iterations


def trained_on_gpu(rank: int, _size: int, task: Task, decisions: Decisions, blind: Lane | None = None):
    """Train on a virtual GPU of each rank; return losses and norms, and what depends on when streams run.

    A lane that is ``blind`` waits for nothing. Kernels add in one order: in fp8, another order shows in the third step.
    """
    with watched(blind) as races, contextlib.ExitStack() as closing:
        closing.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)
        model, optimizer = prepare(task, decisions, device="cuda")
        with optimizer.session:
            seen = train(task, model, optimizer, rank=rank // decisions.tensor_parallel // decisions.context_parallel)
            optimizer.session.full_parameters()
    return seen, list(races.found)


def trained_on_gpu_in_turn(rank: int, size: int, task: Task, decisions: Decisions):
    """Train as :func:`trained_on_gpu`, where a device runs one collective after another, as they were launched.

    Ranks update at different speeds, so that their threads would launch collectives in different orders.
    """
    turn, wait, update = threading.Lock(), Ranks._wait, UpdateTasks.update

    def in_turn(self, group, begin):
        with turn if group in self._on_devices else contextlib.nullcontext():
            wait(self, group, begin)

    def late(self, work, iteration):
        time.sleep(0.03 * rank)
        update(self, work, iteration)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_wait", in_turn)
        patch.setattr(UpdateTasks, "update", late)
        return trained_on_gpu(rank, size, task, decisions)


def read_after_each_step(rank: int, _size: int, task: Task, decisions: Decisions, name: str) -> list[bytes]:
    """Return what a weight is after each step, and at the end what it is among all."""
    model, optimizer = prepare(task, decisions)
    found = []
    with optimizer.session as session:

        def read(_iteration: int) -> None:
            found.append(session.runtime.weights(name).view(torch.uint8).numpy().tobytes())

        train(task, model, optimizer, rank=rank, after_step=read)
        return [*found, session.full_parameters()[name].view(torch.uint8).numpy().tobytes()]


def read_parameters(rank: int, _size: int, task: Task, decisions: Decisions) -> None:
    """Read each parameter after training; only all ranks together read what each has a part of."""
    model, optimizer = prepare(task, decisions)
    with optimizer.session as session:
        train(task, model, optimizer, rank=rank)
        gathers = session.runtime.gathers
        assert ("ranks hold parts of it" in repr(next(model.parameters()))) == gathers
        found = {n: p.detach().clone() for n, p in model.named_parameters() if rank or gathers}
        weights = session.full_parameters()
        assert all(torch.equal(values, weights[name]) for name, values in found.items())


def by_name(rank: int, size: int, program, task: Task, decisions: Decisions, *arguments):
    """Call a program for a model that is planned by its name, with products in fp8; casts are not compiled."""
    plain = make_model

    def make(task):
        model = plain(dataclasses.replace(task, products=""))
        float8.multiply_in_fp8(model, units_of(task, decisions), torch.device("cpu"))
        return model

    from executor.module import float8  # noqa: PLC0415 - needs torchao, and takes a second

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "_compiled", lambda function: function)
        patch.setattr(training, "make_model", make)
        patch.setitem(globals(), "make_model", make)
        return program(rank, size, task, decisions, *arguments)


def saved(rank: int, _size: int, task: Task, decisions: Decisions, folder, start: int = 0, source=None, files=None):
    """Train with a checkpoint after every iteration, from ``source``'s of ``start`` on.

    Return a digest of all state at the beginning, losses and norms, and a digest at the end.
    """
    _, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
    outcomes, level = [], Level(folder, keep=100)
    with optimizer.session, Checkpoints(optimizer, level, on_outcome=outcomes.append, files=files) as checkpoints:
        if start:
            with Checkpoint((source or folder) / f"step-{start:08d}") as checkpoint:
                restore(optimizer, checkpoint)
        begin = _digest(optimizer)
        seen = []
        of_stage = rank % (decisions.num_devices // decisions.pipeline_parallel)
        reader = of_stage // decisions.tensor_parallel // decisions.context_parallel
        torch.manual_seed(11 + reader)  # what is left to chance is a rank's own
        for step, micro_batches in enumerate(batches(task, reader)[start:], start + 1):
            seen += optimizer.forward_backward([{"input_ids": each, "labels": each} for each in micro_batches])
            seen.append(float(optimizer.clip_grad_norm_(task.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step)
        checkpoints.finish()
        end = _digest(optimizer)
    assert all((outcome.error is None) == (files is None) for outcome in outcomes), outcomes
    return begin, seen, end


def resumed(rank: int, _size: int, task: Task, decisions: Decisions, folder):
    """Go on from the newest checkpoint that is whole; return which, why not from others, and a digest of all state."""
    _, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
    with optimizer.session, Checkpoints(optimizer, Level(folder)) as checkpoints:
        found = checkpoints.resume()
        return rank, found.step, found.refused, _digest(optimizer)


def on_nodes(
    rank: int, _size: int, task: Task, decisions: Decisions, folder, places, per_node: int, until: int, shared="shared"
):
    """Go on from the newest checkpoint of nodes with folders of their own, and train until a step.

    Args:
        places: the name of each node's folder.
        per_node: ranks on a node.

    Return the step gone on from, why not from others, digests of all state there and at the end, and rank 0's outcomes.
    """
    os.environ["LOCAL_RANK"] = str(rank % per_node)
    _, optimizer = made = prepare(task, decisions, checkpoint_buffer_bytes=1)
    outcomes, place = [], folder / places[rank // per_node]
    drives = [Level(f"{place}-drive", 2)] if shared == "slow" else []
    slowest = f"local://{folder}/{shared}" if drives else folder / shared  # a URL, whose driver writes files
    levels = [Level(place, 1), *drives, *([Level(slowest, 4 if drives else 2)] if shared else [])]
    with optimizer.session, Checkpoints(optimizer, *levels, on_outcome=outcomes.append) as checkpoints:
        found = checkpoints.resume()
        begin = _digest(optimizer)
        for step, micro_batches in enumerate(batches(task, rank)[found.step : until], found.step + 1):
            for tokens in micro_batches:
                made[0](input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step)
            checkpoints.settle()
        end = _digest(optimizer)
        if not drives:
            checkpoints.promote_newest(20.0)
        while drives and rank == 0 and until > 4 and (4, 2) not in {(each.step, each.level) for each in outcomes}:
            time.sleep(0.02)
    return found.step, found.refused, begin, end, [(each.step, each.level, each.error) for each in outcomes]


def _digest(optimizer) -> str:
    """Return a digest of all weights and state, whole."""
    weights = {name: values.clone() for name, values in optimizer.session.stream_weights()}
    held = [weights[name] for name in sorted(weights)]
    for state in optimizer.state_dict()["state"].values():
        held += [state[key] for key in sorted(state)]
    return hashlib.sha256(b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in held)).hexdigest()


def freeze(model, names: tuple[str, ...]):
    for name, parameter in model.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(False)
    return model


def around_training(rank: int, _size: int, task: Task, decisions: Decisions, more: Decisions) -> list[str]:
    """Evaluate, save, go on from what was saved under other decisions, and close; return what is wrong."""
    wrong = []
    plain = make_model(task)
    rank //= decisions.tensor_parallel
    tokens = batches(task, rank)[0, 0]
    shared = decisions.tensor_parallel > 1 or decisions.expert_parallel > 1
    close = 1e-5 if shared else 0.0  # sums in another order

    def compare(what: str, model) -> None:
        saved = model.state_dict()
        plain.load_state_dict(saved)
        with torch.no_grad():
            ours, theirs = (one.eval()(input_ids=tokens).logits for one in (model, plain))
            if not torch.allclose(ours, theirs, rtol=close, atol=close):
                wrong.append(f"{what}: evaluation differs from the weights that were saved")
        if not same(saved, optimizer.session.full_parameters()):
            wrong.append(f"{what}: the saved weights are not those of the session")
        model.train()

    model, optimizer = prepare(task, decisions)
    with optimizer.session:
        compare("at first", model)
        train(task, model, optimizer, rank=rank)
        compare("after training", model)
        saved = {n: w.clone() for n, w in model.state_dict().items()}
        state = optimizer.state_dict()
        train(task, model, optimizer, rank=rank)
        compare("after more", model)
        expected = {n: w.clone() for n, w in model.state_dict().items()}
    if not same(expected, model.state_dict()):
        wrong.append("the closed model has other weights")
    stock = torch.optim.AdamW(groups(plain), lr=5e-3, betas=(0.9, 0.95))
    stock.load_state_dict(state)  # its format
    if any(entry["exp_avg"].shape != parameter.shape for parameter, entry in stock.state.items()):
        wrong.append("the saved state has other shapes than the parameters")
    model = make_model(task)
    model.load_state_dict(saved)
    model, optimizer = prepare(task, more, model=model)
    with optimizer.session:
        optimizer.load_state_dict(state)
        compare("loaded", model)
        train(task, model, optimizer, rank=rank)
        if not same(expected, model.state_dict()):
            wrong.append("what was loaded trains to other weights")
    return wrong


def seen_from_outside(rank: int, _size: int, task: Task, decisions: Decisions) -> list[str]:
    """Train, and return what of memory and times is not as the schedule says."""
    wrong = []
    model, optimizer = prepare(task, decisions, record=True)
    with optimizer.session as session:
        train(task, model, optimizer, rank=rank // decisions.tensor_parallel // decisions.context_parallel)
        timeline = session.timeline()
        for tier, memory in session.memory().items():
            stated = Counter()
            for buffer in session.schedule.buffers:
                if buffer.tier is tier and buffer.first is None and buffer.memory_class != "workspace":
                    stated[buffer.memory_class] += buffer.num_bytes
            if +stated != +Counter(memory.static_bytes):
                wrong.append(f"{tier}: {memory.static_bytes} instead of {stated}")
    for iteration in range(task.iterations):
        spans = {span.task: span for span in timeline.of_iteration(iteration)}
        wrong += [
            f"{task_.name} begins before {timeline.schedule.tasks[i].name} ends"
            for task_ in timeline.schedule.tasks
            for i in task_.after
            if spans[i].end_s > spans[task_.index].start_s
        ]
    return wrong


def metered(_rank: int, _size: int, config, batch: Batch, decisions: Decisions) -> tuple[int, int]:
    """Train under decisions; return what the device has held: once, and at most beside that.

    The least of three iterations: on a busy machine gloo's threads give tensors up milliseconds after the sum is there.
    """
    model = transformers.AutoModelForCausalLM.from_config(config).to(DTYPES[batch.dtype_bytes])
    found = units(build_graph(from_hf_config(config.to_dict(), "metered"), batch))
    tokens = torch.randint(config.vocab_size, (batch.micro_batch, batch.seq_len))
    dist.broadcast(tokens, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    _, optimizer = prepare_session(model.train(), optimizer, found, decisions, session_options())
    with optimizer.session:
        peaks_bytes = []
        for _ in range(3):
            memory = memory_of_step(model, optimizer, tokens)[Tier.GPU]
            peaks_bytes.append(memory.dynamic_peak_bytes)
    return sum(memory.static_bytes.values()), min(peaks_bytes)


def bound_cores(rank: int, size: int, choice, given):
    """Return a rank's cores, the masks of all of its threads, and those after it has closed."""
    before = os.sched_getaffinity(0)
    if given:
        os.sched_setaffinity(0, given[rank])
    task = Task("gpt2", iterations=1)
    decisions = decide(task, uniform("gpu", "cpu"), data_parallel=size, zero_stage=2)
    model, optimizer = prepare(task, decisions, cores=choice, num_threads=None)
    with optimizer.session as session:
        train(task, model, optimizer, rank=rank)
        own, found = session.cores.own, _masks()
    after = _masks()
    os.sched_setaffinity(0, before)
    return own, found, after


def _masks() -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(int(entry.name))) for entry in Path("/proc/self/task").iterdir()}


def changed(rank: int, _size: int, task: Task, ways: list[Decisions], folder, refuses: int | None = None):
    """Train, each iteration under the next of some decisions; return what ``trained`` does, and what was refused.

    One rank may lack the memory for the first change.
    """
    model, optimizer = prepare(task, ways[0])
    refused = []

    def change(iteration: int) -> None:
        if iteration + 1 >= len(ways):
            return
        small = iteration == 0 and refuses == rank
        options = session_options(host_capacity_bytes=1000 if small else None)
        try:
            optimizer.switch_plan(units_of(task, ways[iteration + 1]), ways[iteration + 1], options, folder)
        except (DeviceMemoryError, RankError, StorageError) as error:
            refused.append(type(error).__name__)

    try:
        seen = train(task, model, optimizer, after_step=change, rank=rank // ways[0].tensor_parallel)
        final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    finally:
        optimizer.session.close()
    return seen, {n: w.view(torch.uint8).numpy() for n, w in final.items()}, refused


def compiled(rank: int, _size: int, task: Task, decisions: Decisions, backend: str | None):
    """Train with compiled blocks; return what ``trained`` does, and how many graphs there were after each step."""
    from torch._dynamo.utils import counters  # noqa: PLC0415 - takes seconds, in every process

    with warnings.catch_warnings():
        warnings.simplefilter("default")  # Dynamo warns of what it does itself
        torch._dynamo.reset()
        counters.clear()
        model, optimizer = prepare(task, decisions, compile_blocks=backend)
        graphs = []
        with optimizer.session as session:
            seen = train(
                task,
                model,
                optimizer,
                rank=rank // decisions.tensor_parallel,
                before_step=lambda _: graphs.append(counters["stats"]["unique_graphs"]),
            )
            final = {n: w.clone() for n, w in session.full_parameters().items()}
    return seen, {n: w.view(torch.uint8).numpy() for n, w in final.items()}, graphs


def left(rank: int, _size: int, task: Task, decisions: Decisions):
    """Train; return bytes that left and that were to leave by unit, what was made again, and sums made for that."""
    model, optimizer = prepare(task, decisions)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # or what it keeps is behind the last product
    moved, again, sums = {}, [], 0
    with optimizer.session as session:
        activations, group = session.runtime.offloaded, session.runtime.ranks.tensor
        leave, all_reduce = activations.offload, group.all_reduce

        def leaving(unit: str, room: str) -> None:
            leave(unit, room)
            segment = activations._segments[unit]
            moved[unit] = sum(tensor.num_bytes for tensor in segment.offloaded(unit))
            again.extend(str(product.function) for product in segment.products_of[unit] if not product.is_offloaded)

        def adding_up(values: torch.Tensor, *op: object) -> None:
            nonlocal sums
            task_ = session.driver.progress.task
            sums += task_ is not None and task_.op is Op.REMAKE
            all_reduce(values, *op)

        activations.offload, group.all_reduce = leaving, adding_up
        train(task, model, optimizer, rank=rank // decisions.tensor_parallel // decisions.context_parallel)
        stated = {t.unit: t.num_bytes for t in session.schedule.tasks if t.op is Op.OFFLOAD}
    return moved, stated, again, sums


def same(some, other) -> bool:
    return some.keys() >= other.keys() and all(torch.equal(some[name], other[name]) for name in other)


def rng_state_after(rank: int, _size: int, task: Task, decisions: Decisions, folder):
    """Return random numbers after going on from a checkpoint of ranks that had different ones."""
    torch.manual_seed(rank)
    _, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
    with optimizer.session, Checkpoints(optimizer, Level(folder)) as checkpoints:
        checkpoints.resume()
        return torch.rand(3).tolist()


def loaded_and_saved(rank: int, _size: int, task: Task, decisions: Decisions, folder: str):
    """Load weights of ``source`` into a model without any, train, load again, and save the masters."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[task.family]()).train()
    model, optimizer = prepare(task, decisions, model=model)
    with optimizer.session as session:
        load(optimizer, Path(folder) / "source")
        train(task, model, optimizer, rank=rank // decisions.tensor_parallel // decisions.context_parallel)
        warns = pytest.warns(RuntimeWarning, match="belong to other weights")
        with warns if rank == 0 else contextlib.nullcontext():  # warnings are errors
            load(optimizer, Path(folder) / "source")
        save(optimizer, Path(folder) / "saved", dtype="float32", max_shard_bytes=20_000)
        digest = hashlib.sha256()
        for name, values in session.stream_weights():
            digest.update(name.encode() + values.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def prompt_saved(rank: int, _size: int, config, planned: tuple[Unit, ...], decisions: Decisions, folder: str) -> float:
    """Train a prompt of ``peft`` beside the model of ``source`` for a step, save it, and return its evaluated loss."""
    import peft  # noqa: PLC0415 - takes seconds

    torch.manual_seed(3)
    source = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "source")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of what peft asks of transformers
        model = peft.get_peft_model(source, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = prepare_session(model, torch.optim.AdamW(trained, lr=1e-2), planned, decisions)
    with optimizer.session:
        own, same = (torch.full((2, 8), value) for value in (1 + rank, 1))
        model(input_ids=own, labels=own).loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        save(optimizer, Path(folder) / "adapter")
        assert model.training
        with torch.no_grad():
            return float(model.eval()(input_ids=same, labels=same).loss)


def parked_on_the_way(rank: int, _size: int, task: Task, decisions: Decisions):
    """Train as :func:`trained` does, parked after every step, when weights are read."""
    model, optimizer = prepare(task, decisions)
    with optimizer.session as session:

        def between(_iteration):
            session.park()
            session.runtime._fill_slot = None  # nothing may be brought to the device
            found = {name: values.clone() for name, values in session.stream_weights()}
            del session.runtime._fill_slot
            session.unpark()
            assert all(torch.equal(found[name], values) for name, values in session.full_parameters().items())

        seen = train(task, model, optimizer, rank=rank, after_step=between)
        final = {n: w.clone() for n, w in session.full_parameters().items()}
    return seen, {n: w.view(torch.uint8).numpy() for n, w in final.items()}


def measured_while_parked():
    """Print device memory, and what a process holds before, while and after its session is parked, on the host."""
    CONFIGS["wide"] = lambda: CONFIGS["llama"]().__class__(
        **CONFIGS["llama"]().to_dict() | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 256}
    )
    task = Task("wide", torch.float32)
    _, optimizer = prepare(task, decide(task, uniform("gpu", "cpu"), subgroup_params=1 << 30))

    def held_bytes():
        found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
        return int(found[1]) << 10

    with optimizer.session as session:
        before = held_bytes()
        away = session.park()
        meanwhile = held_bytes()
        session.unpark()
        print(away.device_bytes, before, meanwhile, held_bytes())  # noqa: T201


class Spectral(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(5, 32, 32, dtype=torch.complex64) / 8)
        self.last = torch.nn.Linear(32, 8)

    def forward(self, x):
        modes = torch.einsum("bti,tio->bto", torch.fft.rfft(x, dim=1), self.weight)
        return self.last(torch.fft.irfft(modes, n=x.shape[1], dim=1)).square().mean()


def trained_with_complex_weights(rank: int, size: int, folder) -> list[str]:
    """Train with complex weights under two plans, and with all ranks' batches in memory; return what differs."""
    batches = [torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(step)) for step in range(4 * size)]
    plain, model = Spectral(), Spectral()
    theirs = torch.optim.NAdam(plain.parameters(), lr=0.02)
    ours = torch.optim.NAdam(model.parameters(), lr=0.02)
    ours = ullage.prepare(model, ours, batches[0], hardware="epyc-turin-2c")[1]
    session = ours.session
    for step in range(0, len(batches), size):
        for batch in batches[step : step + size]:
            (plain(batch) / size).backward()
        model(batches[step + rank]).backward()
        for each, optimizer in ((plain, theirs), (model, ours)):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        if step == 2 * size:
            ours.switch_plan(session.units, session.decisions, session.options, folder)
    with ours.session:
        state, expected = (each.state_dict()["state"] for each in (ours, theirs))
        found = {"weights": (model.state_dict()["weight"], plain.weight)}
        found |= {key: (state[0][key], value) for key, value in expected[0].items()}
        return [
            name
            for name, (a, b) in found.items()
            if a.dtype is not b.dtype or not torch.allclose(a, b.detach(), rtol=1e-5, atol=1e-6)
        ]


def edited(rank: int, size: int, task: Task, decisions: Decisions, name: str):
    """Run a loop of ``edits``; return what it sees and what it sees in memory, and weights that differ."""
    replicas = size // decisions.tensor_parallel

    def averaging(before=None) -> None:
        """Average gradients as DDP does; those that were there ``before`` are averaged already."""
        old = before or [None] * len(list(plain.parameters()))
        for parameter, there in zip(plain.parameters(), old, strict=True):
            gradient = parameter.grad if there is None else parameter.grad - there
            dist.all_reduce(gradient)
            gradient /= replicas * decisions.tensor_parallel
            parameter.grad = gradient if there is None else there + gradient

    edit, tokens = EDITS[name], batches(task, rank // decisions.tensor_parallel // decisions.context_parallel)[:, 0]
    plain = make_model(task)
    reference = ReferenceOptimizer(make_optimizer(task, plain))
    reference.register_step_pre_hook(_follow_writes)
    torch.manual_seed(11)
    expected = [edit(plain, reference, one, averaging, step) for step, one in enumerate(tokens)]
    model, optimizer = prepare(task, decisions)
    torch.manual_seed(11)
    with optimizer.session as session:
        found = [edit(model, optimizer, one, lambda *_: None, step) for step, one in enumerate(tokens)]
        final = session.full_parameters()
        off = {n: float((final[n] - w.detach()).abs().max()) for n, w in plain.named_parameters()}
    return found, expected, max(off.values())


def with_two_optimizers(rank: int, size: int, task: Task, decisions: Decisions):
    """Let a second optimizer step after the prepared one, in each second step; return as :func:`edited`."""
    tokens = batches(task, rank)[:, 0]

    def loop(model, optimizer, second, average):
        seen = []
        for step, one in enumerate(tokens):
            loss = model(input_ids=one, labels=one).loss
            loss.backward()
            average()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), norm.item()]
            if step % 2:
                second.step()
                second.zero_grad()
        return seen

    def average() -> None:
        for parameter, there in zip(plain.parameters(), before, strict=True):
            own = parameter.grad if there is None else parameter.grad - there
            dist.all_reduce(own)
            parameter.grad = own / size if there is None else there + own / size
        before[len(first) :] = [parameter.grad.clone() for parameter in list(plain.parameters())[len(first) :]]

    def divided(model):
        parameters = list(model.parameters())
        of_first, of_second = parameters[:3], parameters[3:]
        return of_first, torch.optim.AdamW(of_first, eps=1e-3), torch.optim.SGD(of_second, lr=0.1, momentum=0.9)

    plain = make_model(task)
    first, *optimizers = divided(plain)
    before = [None] * len(list(plain.parameters()))
    optimizers[1].register_step_post_hook(lambda *_: before.__setitem__(slice(None), [None] * len(before)))
    expected = loop(plain, *optimizers, average)
    model = make_model(task)
    _, optimizer, second = divided(model)
    model, optimizer = prepare_session(model, optimizer, units_of(task, decisions), decisions, session_options())
    with optimizer.session as session:
        found = loop(model, optimizer, second, lambda: None)
        final = session.full_parameters()
        off = {n: float((final[n] - w.detach()).abs().max()) for n, w in plain.named_parameters()}
    return found, expected, max(off.values())


def _follow_writes(reference: ReferenceOptimizer, *_given) -> None:
    """Let master copies in float32 be what the loop has written to the weights."""
    for parameter, state in reference.state.items():
        state["master"].copy_(parameter.detach().reshape(-1))
