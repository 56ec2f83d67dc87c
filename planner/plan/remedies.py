"""Remedies for an infeasible request: the smallest change of each kind with which a plan was found."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from hwprofiles.profile import HardwareProfile
from planner.bounds.certificate import infeasible
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models.captured import CapturedModel
from planner.models.config import ModelConfigError
from planner.plan.competition import first_fit
from planner.plan.machines import larger_devices, larger_hosts, most_devices
from planner.plan.planning import InfeasibleError, find
from planner.terms import Storage, default_micro_batch

# The most plans to try for each kind of change, without those that are proven not to fit.
_TRIALS = 2
_ALL_TOKENS = 100_000_000
# A short search is enough to see whether a plan fits.
_SIMULATIONS = 1


Changes = Iterator[tuple[str, Request]]
"""Requests to try, the smallest change first, each with the words for what has changed."""

Remedy = tuple[str, float]
"""What to change, as an option or in words, and the iteration time predicted from a very short search."""


def what_would_fit(
    request: Request, further: Callable[[Request], Changes] = lambda _request: iter(())
) -> Iterator[Remedy]:
    """Yield, for every kind of change, the smallest one that makes a request fit, as soon as it is found.

    If no single change is enough, each is combined with the smallest micro-batch.

    Args:
        request: what does not fit.
        further: yields the changes of one more kind, which is tried last.
    """
    found = False
    for remedy in _changes(request, further):
        found = True
        yield remedy
    *_, (words, smallest) = [("", request), *_smaller_micro_batch(request)]
    if words and not found:
        for more, iteration_s in _changes(smallest, further):
            yield f"{words} and {more}", iteration_s


def _changes(request: Request, further: Callable[[Request], Changes]) -> Iterator[Remedy]:
    hardware = request.hardware
    kinds = (
        _smaller_micro_batch(request),
        _storage(request),
        _more_devices(request),
        _shared_sequences(request),
        _on(larger_hosts(hardware), request),
        _on(larger_devices(hardware), request),
        further(request),
    )
    for kind in kinds:
        if remedy := _first(kind):
            yield remedy


def _first(changes: Changes) -> Remedy | None:
    trials = 0
    for words, request in changes:
        changed = request
        if trials == _TRIALS:
            return None
        if isinstance(changed.model, CapturedModel) and changed.layer_tile_tokens is None:
            changed = dataclasses.replace(changed, layer_tile_tokens=_ALL_TOKENS)  # a capture with tiles takes long
        try:
            tried = variants(changed)
        except ModelConfigError:  # a captured model that does not take the change
            continue
        rivals = [rival for rival in tried if not infeasible((rival,))]  # much faster than planning
        if not rivals:
            continue
        trials += 1
        if fits := first_fit(rivals):
            return words, fits.iteration_s
        with suppress(InfeasibleError):
            return words, find(changed, _SIMULATIONS).prediction.iteration_s
    return None


def _smaller_micro_batch(request: Request) -> Changes:
    """Halve the micro-batch; accumulation keeps the global batch. Some captured models have but one micro-batch."""
    chosen = request.global_batch is not None and request.micro_batch is None  # the search tried all sizes
    if chosen or (isinstance(request.model, CapturedModel) and not request.model.is_free):
        return
    size, repeats = request.micro_batch or default_micro_batch(request.seq_len), request.num_micro_batches or 1
    while size % 2 == 0:
        size, repeats = size // 2, repeats * 2
        changed = dataclasses.replace(request, micro_batch=size, num_micro_batches=repeats)
        yield f"--micro-batch {size} --accumulate {repeats}", changed


def _storage(request: Request) -> Changes:
    """Offload activations to the host, then use drives, if there are any and the request does not already."""
    ways: tuple[Storage, ...] = ("never", "activations", "nvme") if request.hardware.nvme else ("never", "activations")
    for storage in ways[ways.index(request.storage) + 1 :]:
        yield f"--storage {storage}", dataclasses.replace(request, storage=storage)


def _more_devices(request: Request) -> Changes:
    count = request.num_devices * 2
    while count <= most_devices(request.hardware):
        yield f"--gpus {count}", dataclasses.replace(request, num_devices=count)
        count *= 2


def _shared_sequences(request: Request) -> Changes:
    """Let devices share sequences, of which as many are read as before: more devices, or those that are there."""
    if isinstance(request.model, CapturedModel) or request.context_parallel or request.global_batch is not None:
        return
    count = 2
    while count <= max(request.num_devices, most_devices(request.hardware)):
        shared = dataclasses.replace(request, context_parallel=count)
        if request.num_devices == 1:
            yield f"--gpus {count} --parallel context={count}", dataclasses.replace(shared, num_devices=count)
        elif request.num_devices % count == 0:
            repeats = (request.num_micro_batches or 1) * count
            words = f"--parallel context={count} --accumulate {repeats}"
            yield words, dataclasses.replace(shared, num_micro_batches=repeats)
        count *= 2


def _on(machines: Iterable[tuple[str, HardwareProfile]], request: Request) -> Changes:
    for words, hardware in machines:
        yield words, dataclasses.replace(request, hardware=hardware)
