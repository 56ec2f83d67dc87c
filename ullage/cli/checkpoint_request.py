"""Turn the options of :mod:`ullage.cli.options` into a request for checkpoints."""

from typing import Any

from hwprofiles.profile import HardwareProfile, Storage
from hwprofiles.quantity import Curve, CurvePoint, Provenance, Quantity
from planner.plan.checkpoints import CheckpointRequest
from planner.terms import MIN_CHECKPOINTS
from ullage.cli.options import Options

_UNKNOWN_CAPACITY_BYTES = 1e15
_REQUEST_BYTES = 1e9


def checkpoints_of(asked: Options) -> CheckpointRequest | None:
    """Return the request that the options describe; ``None`` without ``--mtbf``.

    Raises:
        ValueError: options of checkpoints are given without ``--mtbf``, or ``--keep`` is below 2.
    """
    given: dict[str, Any] = {
        "max_overhead": asked.max_checkpoint_overhead,
        "max_lost_s": asked.max_lost_work,
        "restart_s": asked.restart,
        "keep": asked.keep,
        "buffer_bytes": asked.checkpoint_buffer,
        "drive_writes_per_day": asked.drive_writes_per_day,
        "num_iterations": asked.iterations,
    }
    found = {name: value for name, value in given.items() if value is not None}
    if asked.mtbf is None:
        if found or asked.pfs_bandwidth is not None:
            raise ValueError("--checkpoints has no effect without --mtbf; give it, as in --mtbf 6h")
        return None
    if found.get("keep", MIN_CHECKPOINTS) < MIN_CHECKPOINTS:
        raise ValueError(
            f"keep={asked.keep} of --checkpoints is too few: one checkpoint may be damaged; keep at "
            f"least {MIN_CHECKPOINTS} at each level"
        )
    return CheckpointRequest(mtbf_s=asked.mtbf, **found)


def with_pfs(hardware: HardwareProfile, bytes_per_s: int) -> HardwareProfile:
    """Return a profile with a shared file system of the given rate for each node.

    Raises:
        ValueError: the profile has a shared file system already.
    """
    if hardware.pfs is not None:
        raise ValueError(f"pfs-bandwidth of --checkpoints: profile {hardware.name} has a pfs already; leave it out")
    provenance = Provenance(origin="assumed", source="asked for with --checkpoints pfs-bandwidth")
    point = CurvePoint(
        size=_REQUEST_BYTES, **dict.fromkeys(("p10_s", "median_s", "p90_s"), _REQUEST_BYTES / bytes_per_s)
    )
    curve = Curve(size_unit="bytes", points=(point,), provenance=provenance)
    capacity = Quantity(
        value=_UNKNOWN_CAPACITY_BYTES,
        unit="bytes",
        provenance=Provenance(origin="assumed", source="not known; as much as is needed"),
    )
    return hardware.model_copy(update={"pfs": Storage(capacity_bytes=capacity, read=curve, write=curve)})
