"""Calibration between the ranks that ``torchrun`` has started.

Training computes on all devices of a machine at once, and then each is slower than alone: cores share a cache and the
bandwidth of DRAM, GPUs share power and cooling. So all ranks measure their devices at the same time, step by step.
"""

import dataclasses
import os
import re
from typing import Any, Final

import torch
from torch import distributed

from hwprofiles.machine import num_cores, this_machine
from hwprofiles.profile import HardwareProfile
from ullage.calibrate.fabric import joined, probe_collectives
from ullage.calibrate.options import CalibrationOptions, Progress
from ullage.calibrate.run import calibrate

_BUDGET_S, _QUICK_BUDGET_S = 20.0, 4.0
_PARTS: Final = frozenset({"device", "fabric"})


def calibrate_ranks(options: CalibrationOptions, progress: Progress) -> HardwareProfile:
    """Measure devices that all compute, and collectives, over the ranks that ``torchrun`` started.

    Args:
        options: ``only`` has the parts to measure, ``device``, ``fabric`` or both.
            ``base`` is a profile of this machine with as many GPUs as there are ranks on a node.
        progress: see :func:`ullage.calibrate.run.calibrate`; called on rank 0.

    Returns:
        A profile with as many devices as there are ranks; each rank has its own device in it.

    Raises:
        ValueError: the ranks do not fit the machine, or cannot measure a part.
    """
    base, (size, per_node) = options.base, ranks()
    if base is None or not _PARTS.issuperset(options.only or ()):
        raise ValueError(
            "torchrun has started several ranks, which measure devices at once and collectives; add --only device,"
            "fabric, or measure the other parts without torchrun"
        )
    on_gpu = base.device.kind == "gpu"
    _check_fit(base, per_node)
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        if options.measures("device"):

            def step(name: str, done_s: float, total_s: float) -> None:
                distributed.barrier()
                if distributed.get_rank() == 0:
                    progress(name, done_s, total_s)

            base, _ = calibrate(dataclasses.replace(options, only={"device": None}, is_rank=True), step)
        found: dict[str, Any] = {}
        if options.measures("fabric"):
            fabric = probe_collectives(_QUICK_BUDGET_S if options.quick else _BUDGET_S)
            if size > per_node:  # each rank sends its part over the NICs of its node, which they share
                share = fabric.bytes_per_s
                less = {name: getattr(share, name) / per_node for name in ("value", "p10", "p90")}
                found["inter_node"] = fabric.model_copy(update={"bytes_per_s": share.model_copy(update=less)})
            else:
                found["intra_node"] = fabric
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    if size == per_node and not on_gpu:
        rest = (pair for pair in base.topology if not any(re.fullmatch(r"host\d+", place) for place in pair))
        found |= {"devices_per_node": per_node, "topology": (*joined("host", per_node, ()), *rest)}
    data = base.model_copy(update={**found, "measured_on": base.measured_on or this_machine()})
    return HardwareProfile.model_validate(data.model_dump(mode="json", exclude_none=True))


def _check_fit(base: HardwareProfile, per_node: int) -> None:
    device, cores = base.device, num_cores()
    if device.kind == "gpu" and base.devices_per_node != per_node:
        raise ValueError(
            f"{per_node} ranks were started on this node, but {base.name} has {base.devices_per_node} GPUs; start "
            f"`torchrun --nproc-per-node {base.devices_per_node}`, or measure all parts again"
        )
    if device.kind != "gpu" and device.num_cores * per_node > cores:
        raise ValueError(
            f"{per_node} ranks would compute on {device.num_cores} cores each, but there are {cores}; start fewer"
        )


def ranks() -> tuple[int, int]:
    """Return the number of ranks that ``torchrun`` has started, in total and on this node; (1, 1) without it."""
    return int(os.environ.get("WORLD_SIZE") or 1), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
