"""The error if memory runs out: a table of predicted and actual bytes by class, and the remedy."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import torch
from rich.console import Group, RenderableType

from executor.devices.cuda import RESERVED, RETRIES
from executor.memory.arenas import DeviceMemoryError, MeasuredMemory
from hwprofiles.profile import FOR_LIBRARIES_BYTES
from planner.plan.document import Plan
from planner.schedule.tasks import MemoryClass, Tier
from ullage.output.console import table
from ullage.output.formatting import si
from ullage.training.processes import ranks_per_node

_COMES_AND_GOES: AbstractSet[MemoryClass] = frozenset({MemoryClass.ACTIVATIONS, MemoryClass.WORKSPACE})
# If the ledger does not show how much memory was missing, propose a limit that is lower by this fraction.
_MARGIN = 0.05


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory of one process in a tier that was too small.

    Attributes:
        tier: the tier.
        what: the event in words.
        predicted_bytes, actual_bytes: bytes by class; ``actual_bytes`` lacks classes that were not measured.
        capacity_bytes: capacity that the plan may use.
        libraries_bytes: bytes of ``--memory device=`` that are not for tensors.
    """

    tier: Tier
    what: str
    predicted_bytes: Mapping[str, int]
    actual_bytes: Mapping[str, int]
    capacity_bytes: int
    libraries_bytes: int = 0

    @property
    def remedy(self) -> str:
        """The remedy in one sentence."""
        excess = sum(self.actual_bytes.values()) - sum(self.predicted_bytes.values())
        enough = self.capacity_bytes - (excess if excess > 0 else int(_MARGIN * self.capacity_bytes))
        if self.tier is Tier.GPU:
            size = max(enough, 0) + self.libraries_bytes
            return f"plan for less device memory: `ullage plan ... --memory device={size // 10**6}MB`"
        return (
            "free memory on this machine; or run `ullage calibrate` with the other programs running, and plan again; "
            "or plan with a smaller --micro-batch, more devices, or --storage nvme"
        )


class OutOfMemoryError(MemoryError):
    """Training takes more memory of a tier than there is.

    Attributes:
        report: predicted and actual bytes by class.
    """

    def __init__(self, report: MemoryReport) -> None:
        super().__init__(f"{report.what}; {report.remedy}")
        self.report = report


@contextlib.contextmanager
def reporting_out_of_memory(
    plan: Plan, memory: Callable[[], Mapping[Tier, MeasuredMemory]] | None = None
) -> Iterator[None]:
    """Turn any out-of-memory error inside the ``with`` block into one error with the ledger.

    Args:
        plan: the executed plan.
        memory: returns the allocated memory; ``None`` before anything is allocated.

    Raises:
        OutOfMemoryError: memory ran out.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        if (report := _report_of(plan, error, memory)) is None:
            raise
        raise OutOfMemoryError(report) from error


def check_device(plan: Plan, use: MeasuredMemory) -> None:
    """Check a device's peak against the capacity that the plan keeps to.

    A GPU ends training by itself when its memory is full; the plan's capacity may be less. So going beyond that is a
    ``RuntimeWarning`` there.

    Raises:
        OutOfMemoryError: the device's memory is an arena in ordinary memory, and the peak is above the capacity.
    """
    capacity_bytes = int(plan.hardware.device.memory_bytes.value)
    reserved_bytes = use.allocator.get(RESERVED, 0)
    what = ""
    if use.peak_bytes > capacity_bytes:
        what = f"the device holds {si(use.peak_bytes, 'B')} at its peak, but has {si(capacity_bytes, 'B')}"
    elif reserved_bytes > capacity_bytes + FOR_LIBRARIES_BYTES:
        what = (
            f"PyTorch has reserved {si(reserved_bytes, 'B')} of the device, but the plan has "
            f"{si(capacity_bytes, 'B')} and {si(FOR_LIBRARIES_BYTES, 'B')} for libraries"
        )
    if what:
        error = OutOfMemoryError(_report(plan, Tier.GPU, what, use.static_bytes, use.dynamic_peak_bytes))
        if plan.hardware.device.kind == "host":
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def warning_of_retries(counts: Mapping[str, int]) -> str:
    """Return a line about an allocator that ran out of memory after the first iterations; empty if it did not.

    Args:
        counts: see :meth:`executor.devices.backend.Backend.allocator_counts`.
    """
    if not (num_retries := counts.get(RETRIES, 0)):
        return ""
    return (
        f"warning: device memory was full {num_retries} x after the first iterations; each time PyTorch's allocator "
        "waited for the device to give memory back, so times are too long: plan with a smaller --memory device="
    )


def render_report(report: MemoryReport) -> RenderableType:
    """Return the report for printing with :func:`ullage.output.console.console`."""
    rows = table(f"memory of the {report.tier}, one process", "", "predicted", "actual")
    for name in {**report.predicted_bytes, **report.actual_bytes}:
        pair = (report.predicted_bytes.get(name, 0), report.actual_bytes.get(name))
        rows.add_row(name, *("not measured" if value is None else si(value, "B") for value in pair))
    totals = (sum(side.values()) for side in (report.predicted_bytes, report.actual_bytes))
    rows.add_row("in all", *(si(total, "B") for total in totals))
    rows.add_row("capacity", si(report.capacity_bytes, "B"), "")
    return Group(f"out of memory: {report.what}", "", rows, "", f"remedy: {report.remedy}")


def _report_of(
    plan: Plan, error: BaseException, memory: Callable[[], Mapping[Tier, MeasuredMemory]] | None
) -> MemoryReport | None:
    cause: BaseException | None = error
    while cause is not None:  # an error in a lane's thread is the cause of a LaneError
        if isinstance(cause, DeviceMemoryError):
            what = f"{cause.name} needs {si(cause.requested_bytes, 'B')} of {cause.tier} memory, but less is free"
            return _report(plan, cause.tier, what, cause.held_bytes, None)
        if isinstance(cause, torch.OutOfMemoryError):
            uses = memory() if memory else {}
            static = uses[Tier.GPU].static_bytes if uses else {}
            dynamic = max(torch.cuda.max_memory_allocated() - sum(static.values()), 0)
            return _report(plan, Tier.GPU, str(cause).split(". ", maxsplit=1)[0], static, dynamic)
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            uses = memory() if memory else {}
            what = str(cause).strip().rpartition("\n")[2] or "the machine has no memory left"
            return _report(plan, Tier.HOST, what, uses[Tier.HOST].static_bytes if uses else {}, None)
        cause = cause.__cause__
    return None


def _report(
    plan: Plan, tier: Tier, what: str, static_bytes: Mapping[MemoryClass, int], dynamic_bytes: int | None
) -> MemoryReport:
    """Compare a ledger with the plan's. ``dynamic_bytes`` are those of temporary tensors, if they were measured."""
    predicted, machine = plan.prediction.memory[tier], plan.hardware
    share = ranks_per_node(plan) if tier is not Tier.GPU else 1
    capacity_bytes = {Tier.GPU: machine.device.memory_bytes.value, Tier.HOST: machine.host.memory_bytes.value}
    merged = _COMES_AND_GOES  # the measurement does not distinguish these classes
    if dynamic_bytes is not None:
        merged |= predicted.by_class.keys() - static_bytes.keys()
    name = ", ".join(sorted(merged & (predicted.by_class.keys() | static_bytes.keys())))
    planned_bytes, actual_bytes = (_joined(side, merged, name) for side in (predicted.by_class, static_bytes))
    if dynamic_bytes is not None:
        actual_bytes[name] = actual_bytes.get(name, 0) + dynamic_bytes
    return MemoryReport(
        tier,
        what,
        {words: count // share for words, count in planned_bytes.items()},
        actual_bytes,
        int(capacity_bytes.get(tier, predicted.capacity_bytes)) // share,
        FOR_LIBRARIES_BYTES if machine.device.kind == "gpu" else 0,
    )


def _joined(bytes_by_class: Mapping[MemoryClass, int], merged: AbstractSet[MemoryClass], name: str) -> dict[str, int]:
    """Return bytes by name of the class; the classes ``merged`` have one name together."""
    totals: dict[str, int] = {}
    for memory_class, count in bytes_by_class.items():
        words = name if memory_class in merged else memory_class.value
        totals[words] = totals.get(words, 0) + count
    return totals
