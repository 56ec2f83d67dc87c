"""The nearest set-up in which another engine fits, if the plan's is too small for it."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import Variant, variant
from planner.decisions import Choice
from planner.models.captured import CapturedModel
from planner.plan.machines import MOST_DEVICES, larger_devices, larger_hosts, most_devices
from planner.schedule.tasks import Tier
from planner.search import Candidate
from ullage.rivals.best import best_with_own_kernels

# The machine that is proposed where no change of the asked one helps: common, and with a network.
ELSEWHERE = "h100"

Change = tuple[str, Request, Choice]
"""What to change, as an option or in words, and what is then planned."""
Seconds = Callable[[Request, Choice], float | None]
"""The predicted seconds of an engine, if it fits."""


def nearest_fit(plan: Variant, name: str, lacking: Candidate) -> tuple[str, float] | None:
    """Return the smallest change with which an engine fits, in words, and its predicted seconds; ``None`` if none does.

    Args:
        plan: the variant that was compared.
        name: of the engine.
        lacking: its best candidate there.
    """

    def seconds(changed: Request, choice: Choice) -> float | None:
        """Return the predicted seconds after a change, if the engine then fits."""
        found = best_with_own_kernels(variant(changed, choice), name)
        return None if found is None or found[1].missing_bytes else found[1].iteration_s

    request, own = plan.request, plan.choice
    for words, changed, choice in _changes(request, own, lacking):
        if (taken_s := seconds(changed, choice)) is not None:
            return words, taken_s
    return _larger_in_both(request, own, seconds) or _elsewhere(request, own, seconds)


def _larger_in_both(request: Request, choice: Choice, seconds: Seconds) -> tuple[str, float] | None:
    """Return the smallest device with which the engine fits beside enough host memory, and then the smallest host."""

    def on(hardware: HardwareProfile) -> float | None:
        return seconds(dataclasses.replace(request, hardware=hardware), choice)

    hosts = list(larger_hosts(request.hardware))
    devices = [("", request.hardware), *larger_devices(request.hardware)]
    if not hosts:
        return None
    sizes = [dict(larger_hosts(device)) for _, device in devices]
    most, _ = hosts[-1]
    place = bisect.bisect_left(sizes, True, key=lambda machines: on(machines[most]) is not None)
    if place == len(sizes):
        return None
    names = list(sizes[place])
    name = names[bisect.bisect_left(names, True, key=lambda words: on(sizes[place][words]) is not None)]
    taken_s = on(sizes[place][name])
    assert taken_s is not None  # it does with the largest
    return " and ".join(filter(None, (devices[place][0], name))), taken_s


def _elsewhere(request: Request, choice: Choice, seconds: Seconds) -> tuple[str, float] | None:
    """Return the fewest devices of a large machine with which an engine fits that has too few here."""
    hardware, ranks = load_profile(ELSEWHERE), choice.tensor_parallel * choice.pipeline_parallel
    count = choice.data_parallel
    while count * ranks <= MOST_DEVICES:
        spread = choice.model_copy(update={"data_parallel": count})
        if (taken_s := seconds(dataclasses.replace(request, hardware=hardware), spread)) is not None:
            more = f" and {count // choice.data_parallel} x the batch" if count > choice.data_parallel else ""
            return f"--hardware {ELSEWHERE} --gpus {count * ranks}{more}", taken_s
        count *= 2
    return None


def _changes(request: Request, choice: Choice, lacking: Candidate) -> Iterator[Change]:
    yield from _smaller_micro_batch(request, choice)
    count = choice.data_parallel * choice.tensor_parallel * choice.pipeline_parallel
    factor = 2
    while count * factor <= most_devices(request.hardware):
        spread = choice.model_copy(update={"data_parallel": choice.data_parallel * factor})
        yield f"--gpus {count * factor} and {factor} x the batch", request, spread
        factor *= 2
    machines = larger_hosts if lacking.missing_bytes.keys() == {Tier.HOST} else larger_devices
    for words, hardware in machines(request.hardware):
        yield words, dataclasses.replace(request, hardware=hardware), choice


def _smaller_micro_batch(request: Request, choice: Choice) -> Iterator[Change]:
    """Halve the micro-batch; accumulation keeps the global batch. A captured model stays at its own."""
    size, repeats = choice.micro_batch, choice.num_micro_batches
    while size % 2 == 0 and not isinstance(request.model, CapturedModel):
        size, repeats = size // 2, repeats * 2
        smaller = choice.model_copy(update={"micro_batch": size, "num_micro_batches": repeats})
        yield f"--micro-batch {size} --accumulate {repeats}", request, smaller
