"""Configurations of DeepSpeed as decisions, which can be simulated beside ours."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Literal

from planner.decisions import Place, UnitDecision
from planner.setup import Setup
from ullage.rivals.decisions import REDUCE_BUCKET_PARAMS, GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed import (
    MAX_LIVE_PARAMS,
    MAX_REUSE_PARAMS,
    PREFETCH_BUCKET_PARAMS,
    num_live_segments,
    reduce_buffer_bytes,
    super_offload,
    twin_flow,
    zero_infinity,
    zero_offload,
)

Device = Literal["none", "cpu", "nvme"]

# Without offloading, the step makes one flat gradient of the rank's shards, and the same in fp32, which stays until the
# update has ended (``stage_1_and_2.py::step``, ``stage3.py::_prepare_fp32_grad_for_sub_group``). Stage 3 does so for
# one subgroup at a time.
_FP32_BYTES = 4
SUBGROUP_PARAMS = 1_000_000_000
"""DeepSpeed's default ``sub_group_size``."""

# Decisions that ZeRO-1 and 2 do not need: parameters are whole on every device, so nothing is gathered.
_WHOLE: Final[dict[str, Any]] = {"module_hooks": False, "max_reuse_params": None, "num_param_slots": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeed:
    """The settings of DeepSpeed that a schedule depends on, with DeepSpeed's defaults.

    Attributes:
        stage: the ZeRO stage.
        optimizer_device: where optimizer state is; ``none`` is the device.
        cpu_ratio: the fraction of the parameters that the CPU updates (Twin-Flow), in stage 3.
        param_device: where parameters are, in stage 3.
        pipeline_read, pipeline_write: whether reads from NVMe, or writes to it, overlap with updates.
        reduce_bucket_params, prefetch_params, max_live_params, max_reuse_params: see the constants of
            :mod:`ullage.rivals.engines.deepspeed`.
        persistent_params: parameters with at most so many values stay on the device.
        super_offload: whether a process of its own updates what the CPU updates (Super-Offload), in stage 3.
        pin_optimizer: whether gradients leave through pinned memory.
        waits: whether stage 3 waits for the last copy of a gradient, as DeepSpeed before 0.19.5 does.
        overlap_comm: whether computing goes on beside reductions, in stages 1 and 2.
    """

    stage: int = 0
    optimizer_device: Device = "none"
    cpu_ratio: float = 1.0
    param_device: Device = "none"
    pipeline_read: bool = False
    pipeline_write: bool = False
    reduce_bucket_params: int = REDUCE_BUCKET_PARAMS
    prefetch_params: int = PREFETCH_BUCKET_PARAMS
    max_live_params: int = MAX_LIVE_PARAMS
    max_reuse_params: int = MAX_REUSE_PARAMS
    persistent_params: int = 100_000
    super_offload: bool = False
    pin_optimizer: bool = True
    waits: bool = False
    overlap_comm: bool = False

    @property
    def gradient_path(self) -> GradientPath:
        """How gradients leave the device."""
        if not self.pin_optimizer:
            return GradientPath.ZERO3_PAGEABLE
        return GradientPath.ZERO3_PINNED if self.waits and self.stage == 3 else GradientPath.ZERO3_ASYNC


def configured(setup: Setup, settings: DeepSpeed) -> Iterator[RivalDecisions]:
    """Yield the decisions of DeepSpeed under some settings: with activations kept, and with all recomputed.

    The model, not the configuration, decides between the two. Stages 1 and 2 with the optimizer on the host move
    gradients as stage 3 does. Parameters leave the device if all updates of their unit do.
    """
    options: dict[str, Any] = {"device_buffer_bytes": reduce_buffer_bytes(setup, settings.reduce_bucket_params)}
    if settings.stage == 3:
        options |= {
            "max_prefetch_params": None if settings.prefetch_params else 0,
            "max_reuse_params": settings.max_reuse_params,
            "num_param_slots": num_live_segments(setup, settings.max_live_params),
        }
    if settings.stage and settings.optimizer_device == "none":
        options["step_scratch_bytes"] = setup.given.precision.gradient_bytes + _FP32_BYTES
        options["step_scratch_params"] = SUBGROUP_PARAMS if settings.stage == 3 else None
    for decisions in _placed(setup, settings):
        yield RivalDecisions.model_validate(
            decisions.model_dump()
            | {"policy": f"zero-{settings.stage}", "units": _fetched(setup, settings, decisions)}
            | options
        )


def _placed(setup: Setup, settings: DeepSpeed) -> Iterator[RivalDecisions]:
    """Yield the update places, by the policies of published engines."""
    if settings.stage == 3:
        if settings.optimizer_device == "nvme":
            yield from zero_infinity(
                setup, pipeline_read=settings.pipeline_read, pipeline_write=settings.pipeline_write
            )
        else:
            policy = super_offload if settings.super_offload else twin_flow
            for decisions in policy(setup, (settings.cpu_ratio if settings.optimizer_device == "cpu" else 0.0,)):
                yield decisions.model_copy(update={"gradient_path": settings.gradient_path})
        return
    stage: dict[str, Any] = {"zero_stage": settings.stage if setup.given.data_parallel > 1 else 0}
    stage["all_reduces"] = stage["zero_stage"] > 0
    stage["max_prefetch_params"] = None if settings.overlap_comm else 0
    if settings.optimizer_device == "none":
        if settings.stage < 2:  # all are reduced after the last micro-batch
            stage |= {"reduce_start": "step", "bucket_params": settings.reduce_bucket_params}
        for decisions in list(gpu_only(setup))[:2]:
            yield decisions.model_copy(update=stage)
        return
    for decisions in zero_offload(setup, settings.gradient_path):
        yield decisions.model_copy(update=stage | _WHOLE)


def _fetched(setup: Setup, settings: DeepSpeed, decisions: RivalDecisions) -> dict[str, UnitDecision]:
    """Return units with the places of their parameters."""
    if settings.param_device == "none" or settings.stage < 3:
        return decisions.units
    found, stay = {}, setup.tied
    for unit in setup.units:
        decided = decisions.units[unit.name]
        where = "nvme" if settings.param_device == "nvme" and set(decided.update) <= {Place.NVME} else "host"
        moves = unit.num_weights > settings.persistent_params and unit.name not in stay
        if moves and Place.GPU not in decided.update:
            decided = decided.model_copy(update={"params": where})
        found[unit.name] = decided
    return found
