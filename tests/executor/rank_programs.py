"""Processes of ranks that train, the functions that they run, and the same training in one process."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import signal
import socket
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from forked import FORKS, start_server
from training import (
    CONFIGS,
    FOLDER,
    MICRO_BATCH,
    SEQ_LEN,
    ReferenceOptimizer,
    Task,
    batches,
    decide,
    delay,
    grouped,
    groups,
    make_model,
    make_optimizer,
    memory_of_step,
    prepare,
    session_options,
    train,
    uniform,
    units_of,
    weights,
)
from virtual import install
from virtual.watch import watched

import executor.distributed.ranks
from executor.checkpoint import Checkpoint, DamagedError, Level
from executor.distributed.ranks import Ranks
from executor.distributed.watchdog import RankError
from executor.memory.arenas import DeviceMemoryError
from executor.memory.nvme_files import StorageError
from executor.prepare import ExecutionConfig, prepare_session
from executor.training_state.restoring import restore
from executor.training_state.saving import Checkpoints
from executor.weights import load, save
from planner.decisions import Decisions
from planner.graph import Batch, Unit, build_graph, units
from planner.models import from_hf_config
from planner.schedule.tasks import Lane, Op, Tier

DTYPES = {2: torch.bfloat16, 4: torch.float32}


class Processes:
    """Processes that stay from case to case, as starting one takes seconds.

    Each call forms ranks of the first ones, with a store that none of them serves.
    """

    def __init__(self, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        self._num_calls = 0
        start_server()
        self.workers, self._pipes = [None] * size, [None] * size
        for rank in range(size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = FORKS.Pipe()
        worker = FORKS.Process(target=_serve, args=(rank, self._port, theirs), daemon=True)
        worker.start()
        theirs.close()  # or the end of one process would not be seen here
        self.workers[rank], self._pipes[rank] = worker, ours

    def begin(self, size: int, function, *arguments) -> None:
        """Have ``function(rank, size, *arguments)`` called by each of the first processes."""
        self._num_calls += 1
        for rank in range(size):
            if not self.workers[rank].is_alive():  # a test has killed it
                self._start(rank)
        for pipe in self._pipes[:size]:
            pipe.send((size, f"call {self._num_calls}", function, arguments))

    def results(self, size: int, timeout_s: float = 600.0) -> list:
        """Return what the first processes returned or raised, and what remains of one that is gone."""
        found = []
        for pipe in self._pipes[:size]:
            if not pipe.poll(timeout_s):
                for rank in range(size):  # or what they answer later would be taken for the next call's
                    self.workers[rank].kill()
                    self.workers[rank].join()
                    self._start(rank)
                raise AssertionError("a rank does not answer")
            try:
                found.append(pipe.recv())
            except EOFError as error:
                found.append(error)
        return found

    def call(self, size: int, function, *arguments, timeout_s: float = 600.0) -> list:
        """Return what every rank returned; raise what one raised."""
        self.begin(size, function, *arguments)
        found = self.results(size, timeout_s)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def wait_until_ready(self) -> None:
        """Have all processes import what they need, and meet once.

        On a busy machine gloo may lose the first connection of a group ("connectFullMesh failed"), and a pool that all
        tests share must not end with that.
        """
        for attempts_left in (2, 1, 0):
            try:
                self.call(len(self.workers), ready)
            except RuntimeError as error:
                if "connectFullMesh" not in str(error) or not attempts_left:
                    raise
            else:
                return

    def close(self) -> None:
        for pipe, worker in zip(self._pipes, self.workers, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            worker.join(10)
            worker.kill()


def _serve(rank: int, port: int, pipe) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(Exception):  # tests that need it say why there is none
        install()  # before it goes backward
    warnings.simplefilter("error")  # what torch deprecates is not used
    warnings.filterwarnings("ignore", "the first two steps")  # of short groups, which tests draw
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while (call := pipe.recv()) is not None:
        size, name, function, arguments = call
        try:
            dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
            result = function(rank, size, *arguments)
        except BaseException as error:  # noqa: BLE001 - what went wrong is the result
            result = error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(result)
    FOLDER.cleanup()  # processes of multiprocessing end without doing so


def ready(_rank: int, _size: int) -> None:
    """Wait less for others than a program would: ranks of tests that fail have nothing under way that takes long."""
    executor.distributed.ranks._GRACE_S = 1.0


# What ranks do. All of this is called in another process, so it is found by its name.


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
        seen = train(task, model, optimizer, rank=rank // decisions.tensor_parallel)
        final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    return seen, {n: w.view(torch.uint8).numpy() for n, w in final.items()}


def measured(rank: int, _size: int, task: Task, decisions: Decisions):
    """Train with batches of a rank's own shapes; return how many iterations are in its timeline, and in all ranks'."""
    shape = (("input_ids", (MICRO_BATCH, SEQ_LEN)),)
    model, optimizer = prepare(task, decisions, record=True, batch=shape)
    with optimizer.session as session:
        train(task, model, optimizer, rank=rank)
        return session.timeline().num_iterations, session.mean_timeline().num_iterations


def trained_on_gpu(rank: int, _size: int, task: Task, decisions: Decisions, blind: Lane | None = None):
    """Train on a virtual GPU of each rank; return losses and norms, and what depends on when streams run.

    A lane that is ``blind`` waits for nothing.
    """
    with watched(blind) as races:
        model, optimizer = prepare(task, decisions, device="cuda")
        with optimizer.session:
            seen = train(task, model, optimizer, rank=rank // decisions.tensor_parallel)
            optimizer.session.full_parameters()
    return seen, list(races.found)


def saved(rank: int, _size: int, task: Task, decisions: Decisions, folder, start: int = 0, source=None):
    """Train with a checkpoint after every iteration, from ``source``'s of ``start`` on.

    Return a digest of all state at the beginning, losses and norms, and a digest at the end.
    """
    model, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
    outcomes = []
    with optimizer.session, Checkpoints(optimizer, Level(folder, keep=100), on_outcome=outcomes.append) as checkpoints:
        if start:
            with Checkpoint((source or folder) / f"step-{start:08d}") as checkpoint:
                restore(optimizer, checkpoint)
        begin = _digest(optimizer)
        seen = []
        torch.manual_seed(11 + rank // decisions.tensor_parallel)  # what is left to chance is a rank's own
        for step, micro_batches in enumerate(batches(task, rank // decisions.tensor_parallel)[start:], start + 1):
            for tokens in micro_batches:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                seen.append(loss.item())
            seen.append(float(optimizer.clip_grad_norm_(task.max_norm)))
            optimizer.step()
            checkpoints.save(step)
        checkpoints.finish()
        end = _digest(optimizer)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    return begin, seen, end


def resumed(rank: int, _size: int, task: Task, decisions: Decisions, folder):
    """Go on from the newest checkpoint that is whole; return which, why not from others, and a digest of all state."""
    _, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
    with optimizer.session, Checkpoints(optimizer, Level(folder)) as checkpoints:
        found = checkpoints.resume()
        return rank, found.step, found.refused, _digest(optimizer)


def _digest(optimizer) -> str:
    """Return a digest of all weights and state, whole."""
    weights = optimizer.session.full_parameters()
    held = [weights[name] for name in sorted(weights)]
    for state in optimizer.state_dict()["state"].values():
        held += [state[key] for key in sorted(state)]
    return hashlib.sha256(b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in held)).hexdigest()


def freeze(model, names: tuple[str, ...]):
    for name, parameter in model.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(False)
    return model


def trained_by_torch(rank: int, _size: int, task: Task):
    """Train with ``DistributedDataParallel``, and our kernel for the update; return what ``trained`` does."""
    model = make_model(task)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    seen = train(task, torch.nn.parallel.DistributedDataParallel(model), optimizer, rank=rank)
    return seen, {n: w.view(torch.uint8).numpy() for n, w in weights(model).items()}


def trained_in_memory(rank: int, size: int, task: Task, decisions: Decisions):
    """Train with everything in memory, and the gradients of each unit added up as the plan does; as ``trained``.

    What is added up is the same: one block for each unit, padded to shards, by the same collective, whose order of sums
    depends on the block's size alone. So the bits are the same for any number of ranks.
    """
    model = make_model(task)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    named, piles = dict(model.named_parameters()), piling(task, decisions)

    def added_up(unit, of_parameters):
        block = torch.zeros(decisions.padded_params(unit), dtype=of_parameters[0].dtype)
        parts = [
            block[start : start + gradient.numel()].view(gradient.shape)
            for start, gradient in zip(decisions.layout(unit).starts, of_parameters, strict=True)
        ]
        for part, gradient in zip(parts, of_parameters, strict=True):
            part.copy_(gradient)
        block *= 1 / size
        dist.all_reduce(block)
        return parts

    def exchange(iteration):
        count = len(micro_batches[iteration])
        for unit in (unit for unit in units_of(task, decisions) if unit.num_params):
            parts = [[gradient[m] for gradient in (found[spec.name] for spec in unit.parameters)] for m in range(count)]
            if unit.parameters[0].name in piles:
                parts = [[functools.reduce(torch.add, of_all) for of_all in zip(*parts, strict=True)]]
            means = [added_up(unit, of_parameters) for of_parameters in parts]
            for spec, of_micro_batches in zip(unit.parameters, zip(*means, strict=True), strict=True):
                named[spec.name].grad = functools.reduce(torch.add, of_micro_batches)
                found[spec.name].clear()

    def keep(name):
        def hook(parameter) -> None:
            found[name].append(parameter.grad)
            parameter.grad = None

        return hook

    micro_batches = grouped(task, batches(task, rank))
    found = {name: [] for name in named}
    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(keep(name))
    seen = train(task, model, optimizer, rank=rank, before_clip=exchange)
    return seen, {n: w.view(torch.uint8).numpy() for n, w in weights(model).items()}


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
        train(task, model, optimizer, rank=rank // decisions.tensor_parallel)
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
        steps = {name: entry.step for name, (_, entry) in session.access.parameter_states().items()}
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
    return norm


def with_a_loss_of(_rank: int, _size: int, task: Task, decisions: Decisions, factor: float) -> float:
    """Go forward and backward with a multiple of the loss; return the gradients' norm."""
    model, optimizer = prepare(task, decisions)
    tokens = batches(task)[0, 0]
    with optimizer.session:
        (factor * model(input_ids=tokens, labels=tokens).loss).backward()
        norm = float(optimizer.clip_grad_norm_(task.max_norm))
        optimizer.step()
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
        way = ExecutionConfig(units_of(task, ways[iteration + 1]), ways[iteration + 1], options)
        try:
            optimizer.switch_plan(way, folder)
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
        model, optimizer = prepare(task, decisions, compile_backend=backend)
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

        def leaving(unit: str) -> None:
            leave(unit)
            segment = activations._segments[unit]
            moved[unit] = sum(tensor.num_bytes for tensor in segment.offloaded(unit))
            again.extend(str(product.function) for product in segment.products_of[unit] if not product.is_offloaded)

        def adding_up(values: torch.Tensor) -> None:
            nonlocal sums
            task_ = session.driver.progress.task
            sums += task_ is not None and task_.op is Op.REMAKE
            all_reduce(values)

        activations.offload, group.all_reduce = leaving, adding_up
        train(task, model, optimizer, rank=rank // decisions.tensor_parallel)
        stated = {t.unit: t.num_bytes for t in session.schedule.tasks if t.op is Op.OFFLOAD}
    return moved, stated, again, sums


def with_another_plan(rank: int, _size: int, task: Task, decisions: Decisions) -> None:
    prepare(task, decisions.model_copy(update={"num_param_slots": 2 + rank}))


def same(some, other) -> bool:
    return some.keys() >= other.keys() and all(torch.equal(some[name], other[name]) for name in other)


# The same in one process.


def reference(task: Task, size: int, decisions: Decisions, frozen: tuple[str, ...] = ()):
    """Return what training in memory with the mean of all ranks' gradients gives, as ``trained``, for every rank."""
    return _reference(task, size, piling(task, decisions), frozen)


def piling(task: Task, decisions: Decisions) -> frozenset[str]:
    """Return the parameters whose gradients pile up over micro-batches before ranks add them up."""
    if task.num_micro_batches == 1:
        return frozenset()
    return frozenset(
        spec.name.partition("[")[0]  # of experts apart
        for unit in units_of(task, decisions)
        if decisions.zero_stage < 2
        and not any(decisions.flushes(unit.name, place) for place in decisions.units[unit.name].update)
        for spec in unit.parameters
    )


@functools.cache
def _reference(task: Task, size: int, piles: frozenset[str], frozen: tuple[str, ...]):
    model = freeze(make_model(task), frozen)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.iterations) if task.schedule else None
    rng_states = [torch.Generator().manual_seed(11 + rank).get_state() for rank in range(size)]
    data = [grouped(task, batches(task, rank), rank) for rank in range(size)]
    seen = [[] for _ in range(size)]
    for iteration in range(task.iterations):
        found = [{n: [] for n, _ in model.named_parameters()} for _ in range(size)]
        for rank in range(size):
            torch.set_rng_state(rng_states[rank])
            for tokens in data[rank][iteration]:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                seen[rank].append(loss.item())
                for name, parameter in model.named_parameters():
                    found[rank][name].append(parameter.grad)
                    parameter.grad = None
            rng_states[rank] = torch.get_rng_state()
        for name, parameter in ((n, p) for n, p in model.named_parameters() if p.requires_grad):
            parameter.grad = mean([one[name] for one in found], piles_up=name in piles)
        if task.max_norm is not None:
            norm = float(optimizer.clip_grad_norm_(task.max_norm))
            for mine in seen:
                mine.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return seen, weights(model)


def mean(gradients: list[list[torch.Tensor]], *, piles_up: bool) -> torch.Tensor:
    """Return the mean over ranks, in order, of what each has for some micro-batches: see [Note: Mean gradients]."""
    if piles_up:
        gradients = [[functools.reduce(torch.add, mine)] for mine in gradients]
    of_all = (
        functools.reduce(torch.add, [gradient * (1 / len(gradients)) for gradient in of_ranks])
        for of_ranks in zip(*gradients, strict=True)
    )
    return functools.reduce(torch.add, of_all)


@contextlib.contextmanager
def impatient(silence_s: float):
    """Let ranks take others for dead, or elsewhere, after that long."""
    defaults = Ranks.__init__.__kwdefaults__
    before, defaults["silence_s"] = defaults["silence_s"], silence_s
    try:
        yield
    finally:
        defaults["silence_s"] = before


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
        if alone and iteration == 1 and deed == "state":
            model.state_dict()
        if alone and iteration == 1 and deed == "rate":
            optimizer.param_groups[0]["lr"] *= 0.5
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


def buffers_of(rank: int, _size: int, task: Task, decisions: Decisions):
    """Return buffers as they are after each rank had its own."""
    model = make_model(task)
    model.register_buffer("features", torch.randn(3, generator=torch.Generator().manual_seed(rank)))
    model.register_buffer("is_set", torch.tensor(rank > 0))
    model, optimizer = prepare(task, decisions, model=model)
    with optimizer.session:
        return model.features.tolist(), bool(model.is_set)


def rng_state_after(rank: int, _size: int, task: Task, decisions: Decisions, folder):
    """Return random numbers after going on from a checkpoint of ranks that had different ones."""
    torch.manual_seed(rank)
    _, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=1)
    with optimizer.session, Checkpoints(optimizer, Level(folder)) as checkpoints:
        checkpoints.resume()
        return torch.rand(3).tolist()


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


def loaded_and_saved(rank: int, _size: int, task: Task, decisions: Decisions, folder: str):
    """Load weights of ``source`` into a model without any, train, load again, and save the masters."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[task.family]()).train()
    model, optimizer = prepare(task, decisions, model=model)
    with optimizer.session as session:
        load(optimizer, Path(folder) / "source")
        train(task, model, optimizer, rank=rank // decisions.tensor_parallel)
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
            session.access._fill_slot = None  # nothing may be brought to the device
            found = {name: values.clone() for name, values in session.stream_weights()}
            del session.access._fill_slot
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
