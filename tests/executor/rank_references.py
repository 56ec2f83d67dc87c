"""The training of ranks by PyTorch alone: in one process, with everything in memory, or with DDP."""

import functools

import torch
import torch.distributed as dist
from rank_programs import freeze
from training import (
    ReferenceOptimizer,
    Task,
    batches,
    grouped,
    make_model,
    make_optimizer,
    train,
    units_of,
    weights,
)

from planner.decisions import Decisions


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
    """Return the mean over ranks, in order, of what each has for some micro-batches."""
    if piles_up:
        gradients = [[functools.reduce(torch.add, mine)] for mine in gradients]
    of_all = (
        functools.reduce(torch.add, [gradient * (1 / len(gradients)) for gradient in of_ranks])
        for of_ranks in zip(*gradients, strict=True)
    )
    return functools.reduce(torch.add, of_all)
