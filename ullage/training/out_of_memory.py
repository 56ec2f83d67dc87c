"""If memory runs out: one table of predicted and actual bytes by class, and the remedy."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import torch
from rich.console import Group, RenderableType

from executor.memory.arenas import DeviceMemoryError, MeasuredMemory, MemoryShortage
from planner.plan.document import Plan
from planner.schedule.tasks import MemoryClass, Tier
from ullage.output.console import table
from ullage.output.formatting import si
from ullage.training.processes import ranks_per_node

_COMES_AND_GOES: AbstractSet[MemoryClass] = frozenset({MemoryClass.ACTIVATIONS, MemoryClass.WORKSPACE})
# If the ledger does not show how much memory was missing, propose this fraction less.
_MARGIN = 0.05


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """One tier that was too small, as one process sees it.

    Attributes:
        tier: whose memory it is.
        what: what happened.
        predicted_bytes, actual_bytes: by purpose; ``actual_bytes`` lacks what was not measured.
        capacity_bytes: what the plan may use.
    """

    tier: Tier
    what: str
    predicted_bytes: Mapping[str, int]
    actual_bytes: Mapping[str, int]
    capacity_bytes: int

    @property
    def remedy(self) -> str:
        """What to do, in one sentence."""
        excess = sum(self.actual_bytes.values()) - sum(self.predicted_bytes.values())
        enough = self.capacity_bytes - (excess if excess > 0 else int(_MARGIN * self.capacity_bytes))
        if self.tier is Tier.GPU:
            return f"plan for less of the device: `ullage plan ... --device-memory {max(enough, 0) // 10**6}MB`"
        return (
            "free memory on this machine, or run `ullage calibrate` while it is as full as now and plan again; a "
            "smaller --micro-batch, more devices, or --storage nvme need less memory"
        )


class OutOfMemoryError(MemoryError):
    """Training takes more of a tier than there is.

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
    """Turn any out-of-memory error inside it into one error with the ledger.

    Args:
        plan: the executed plan.
        memory: returns held memory; ``None`` before there is any.

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
    """Check the device's peak if the device is a part of ordinary memory, where nothing else enforces it.

    Raises:
        OutOfMemoryError: the device held more.
    """
    capacity_bytes = int(plan.hardware.device.memory_bytes.value)
    if plan.hardware.device.kind == "host" and use.peak_bytes > capacity_bytes:
        what = f"the device holds {si(use.peak_bytes, 'B')} at its peak, but has {si(capacity_bytes, 'B')}"
        raise OutOfMemoryError(_report(plan, Tier.GPU, what, use.static_bytes, use.dynamic_peak_bytes))


def render_report(report: MemoryReport) -> RenderableType:
    """Return one screen to print with :func:`ullage.output.console.console`."""
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
    while cause is not None:  # what fails in a lane's thread comes as the cause of a LaneError
        if isinstance(cause, DeviceMemoryError) and cause.args and isinstance(cause.args[0], MemoryShortage):
            refusal = cause.args[0]
            held = {**refusal.held_bytes}
            what = f"{refusal.name} needs {si(refusal.requested_bytes, 'B')} of {refusal.tier} memory, and less is free"
            return _report(plan, refusal.tier, what, held, None)
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
    """Put a ledger beside the plan's; ``dynamic_bytes`` is what comes and goes on top of it, if it was measured."""
    predicted, machine = plan.prediction.memory[tier], plan.hardware
    share = ranks_per_node(plan) if tier is not Tier.GPU else 1
    capacity_bytes = {Tier.GPU: machine.device.memory_bytes.value, Tier.HOST: machine.host.memory_bytes.value}
    merged = _COMES_AND_GOES  # is measured as one
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
    )


def _joined(bytes_by_class: Mapping[MemoryClass, int], merged: AbstractSet[MemoryClass], name: str) -> dict[str, int]:
    """Return bytes by class in words, some classes under one name."""
    totals: dict[str, int] = {}
    for memory_class, count in bytes_by_class.items():
        words = name if memory_class in merged else memory_class.value
        totals[words] = totals.get(words, 0) + count
    return totals
