"""Remedies for an infeasible request: the smallest change of each kind with which a plan was found."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress

from hwprofiles.paths import number, quantities, replace
from hwprofiles.quantity import Provenance
from planner.bounds.certificate import infeasible
from planner.models.captured import CapturedModel
from planner.plan.competition import first_fit
from planner.plan.planning import InfeasibleError, Request, find
from planner.terms import DEFAULT_MICRO_BATCH, Storage

# Memory sizes on the market: of one device, and of one host.
_DEVICE_GB = (16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
_HOST_GIB = tuple(2**i for i in range(4, 15))
_MOST_DEVICES = 64
# The most plans to try for each kind of change, without those that are proven not to fit.
_TRIALS = 2
_ASKED = Provenance(origin="assumed", source="a size that is sold")
# A short search is enough to see whether a plan fits.
_SIMULATIONS = 1


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change with which a plan was found.

    Attributes:
        words: what to change, as an option or in words.
        iteration_s: predicted for a plan from a very short search.
    """

    words: str
    iteration_s: float


def what_would_fit(request: Request) -> Iterator[Remedy]:
    """Yield, for every kind of change, the smallest one that makes a request fit, as soon as it is found.

    If no single change is enough, each is combined with the smallest micro-batch.
    """
    found = False
    for remedy in _changes(request):
        found = True
        yield remedy
    *_, (words, smallest) = [("", request), *_smaller_micro_batch(request)]
    if words and not found:
        for remedy in _changes(smallest):
            yield Remedy(f"{words} and {remedy.words}", remedy.iteration_s)


def _changes(request: Request) -> Iterator[Remedy]:
    for kind in (_smaller_micro_batch, _storage, _more_devices, _larger_host, _larger_device):
        if remedy := _first(kind(request)):
            yield remedy


def _first(changes: Iterator[tuple[str, Request]]) -> Remedy | None:
    trials = 0
    for words, changed in changes:
        if trials == _TRIALS:
            return None
        rivals = [rival for rival in changed.variants() if not infeasible((rival,))]  # much faster than planning
        if not rivals:
            continue
        trials += 1
        if fits := first_fit(rivals, changed.seq_len):
            return Remedy(words, fits.iteration_s)
        with suppress(InfeasibleError):
            return Remedy(words, find(changed, _SIMULATIONS).prediction.iteration_s)
    return None


def _smaller_micro_batch(request: Request) -> Iterator[tuple[str, Request]]:
    """Halve the micro-batch; accumulation keeps the global batch. A captured model has only one micro-batch."""
    chosen = request.global_batch is not None and request.micro_batch is None  # the search tried all sizes
    if chosen or isinstance(request.model, CapturedModel):
        return
    size, repeats = request.micro_batch or DEFAULT_MICRO_BATCH, request.num_micro_batches or 1
    while size % 2 == 0:
        size, repeats = size // 2, repeats * 2
        changed = dataclasses.replace(request, micro_batch=size, num_micro_batches=repeats)
        yield f"--micro-batch {size} --accumulate {repeats}", changed


def _storage(request: Request) -> Iterator[tuple[str, Request]]:
    """Offload activations to the host, then use drives, if there are any and the request does not already."""
    ways: tuple[Storage, ...] = ("never", "activations", "nvme") if request.hardware.nvme else ("never", "activations")
    for storage in ways[ways.index(request.storage) + 1 :]:
        yield f"--storage {storage}", dataclasses.replace(request, storage=storage)


def _more_devices(request: Request) -> Iterator[tuple[str, Request]]:
    hardware = request.hardware
    most = _MOST_DEVICES if hardware.inter_node else hardware.devices_per_node
    count = request.num_devices * 2
    while count <= most:
        yield f"--gpus {count}", dataclasses.replace(request, num_devices=count)
        count *= 2


def _larger_device(request: Request) -> Iterator[tuple[str, Request]]:
    sizes = {f"devices with {size} GB": size * 1e9 for size in _DEVICE_GB}
    return _larger(request, "device.memory_bytes", sizes)


def _larger_host(request: Request) -> Iterator[tuple[str, Request]]:
    sizes = {f"hosts with {size} GiB": float(size * 2**30) for size in _HOST_GIB if not request.hardware.one_memory}
    return _larger(request, "host.memory_bytes", sizes)


def _larger(request: Request, path: str, sizes: Mapping[str, float]) -> Iterator[tuple[str, Request]]:
    """Replace a capacity of the machine by the larger ones in ``sizes``, which maps names to capacities."""
    has = number(quantities(request.hardware)[path])
    for words, size in sizes.items():
        if size > has:
            hardware = replace(request.hardware, {path: size}, _ASKED)
            yield words, dataclasses.replace(request, hardware=hardware)
