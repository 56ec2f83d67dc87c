"""What of DeepSpeed's configuration a schedule depends on, as decisions, which can be simulated beside ours."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from planner.decisions import Place, UnitDecision
from planner.setup import Setup
from ullage.rivals.decisions import REDUCE_BUCKET_PARAMS, GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import gpu_only, unsharded
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
Auto = Literal["auto"]

# Without offloading, the step makes one flat gradient of the rank's shards, and the same in fp32, which stays until the
# update has ended (``stage_1_and_2.py::step``, ``stage3.py::_prepare_fp32_grad_for_sub_group``). Stage 3 does so for
# one subgroup at a time.
_FP32_BYTES = 4
SUBGROUP_PARAMS = 1_000_000_000
"""DeepSpeed's default ``sub_group_size``."""

# Decisions that ZeRO-1 and 2 do not need: parameters are whole on every device, so nothing is gathered.
_WHOLE: Final[dict[str, Any]] = {
    "module_hooks": False,
    "max_live_params": None,
    "max_reuse_params": None,
    "num_param_slots": 2,
}


def _whole(value: object) -> object:
    """Return a float that is a whole number, such as ``5e8`` in JSON, as ``int``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_whole), Field(ge=1)]


class Part(BaseModel):
    """A part of a configuration. Keys that a schedule does not depend on are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Offload(Part):
    """``offload_optimizer`` or ``offload_param``. Keys that only one of them has keep their default in the other."""

    device: Device = "none"
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    pin_memory: bool = False
    pipeline_read: bool = False
    pipeline_write: bool = False
    super_offload: bool = False


class Zero(Part):
    """``zero_optimization``. See the constants of :mod:`ullage.rivals.engines.deepspeed` for sizes."""

    stage: Annotated[int, Field(ge=0, le=3)] = 0
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    cpu_offload: bool = False  # the old name of ``offload_optimizer``
    overlap_comm: bool | Auto | None = None  # ``None``: in stage 3 only
    reduce_bucket_size: Positive | Auto = REDUCE_BUCKET_PARAMS
    sub_group_size: Positive | Auto = SUBGROUP_PARAMS
    stage3_prefetch_bucket_size: Count | Auto = PREFETCH_BUCKET_PARAMS
    stage3_param_persistence_threshold: Count | Auto = 100_000
    stage3_max_live_parameters: Positive | Auto = MAX_LIVE_PARAMS
    stage3_max_reuse_distance: Count | Auto = MAX_REUSE_PARAMS

    @property
    def optimizer(self) -> Offload:
        """Where optimizer state is; ``none`` is the device."""
        return self.offload_optimizer or Offload(device="cpu" if self.cpu_offload else "none")

    @property
    def params(self) -> Offload:
        """Where parameters are, in stage 3."""
        return self.offload_param or Offload()

    def size(self, name: str, hidden_size: int | None = None) -> int:
        """Return a size; in place of 'auto' the one that ``transformers`` substitutes, or else the default.

        Args:
            name: a field with a size.
            hidden_size: of the model, if it has one.
        """
        value: int | str = getattr(self, name)
        if not isinstance(value, str):
            return value
        square = (hidden_size or 0) ** 2
        known = {
            "reduce_bucket_size": square,
            "stage3_prefetch_bucket_size": int(0.9 * square),
            "stage3_param_persistence_threshold": 10 * (hidden_size or 0),
        }
        usual: int = type(self).model_fields[name].default
        return known.get(name) or usual


def configured(
    setup: Setup, zero: Zero, hidden_size: int | None = None, *, waits: bool = False
) -> Iterator[RivalDecisions]:
    """Yield the decisions of DeepSpeed under a configuration: with activations kept, and with all recomputed.

    The model, not the configuration, decides between the two. Stages 1 and 2 with the optimizer on the host move
    gradients as stage 3 does. Parameters leave the device if all updates of their unit do.

    Args:
        setup: the request.
        zero: the configuration.
        hidden_size: of the model, for sizes that are 'auto'.
        waits: whether stage 3 waits for the last copy of a gradient, as DeepSpeed before 0.19.5 does.
    """
    bucket_params = zero.size("reduce_bucket_size", hidden_size)
    options: dict[str, Any] = {"device_buffer_bytes": reduce_buffer_bytes(setup, bucket_params)}
    if zero.stage == 3:
        options |= {
            "max_prefetch_params": None if zero.size("stage3_prefetch_bucket_size", hidden_size) else 0,
            "max_live_params": (live_params := zero.size("stage3_max_live_parameters")),
            "max_reuse_params": zero.size("stage3_max_reuse_distance"),
            "num_param_slots": num_live_segments(setup, live_params),
        }
    if zero.stage and zero.optimizer.device == "none":
        options["step_scratch_bytes"] = setup.given.precision.gradient_bytes + _FP32_BYTES
        options["step_scratch_params"] = SUBGROUP_PARAMS if zero.stage == 3 else None
    resident_params = zero.size("stage3_param_persistence_threshold", hidden_size)
    for decisions in _placed(setup, zero, bucket_params, _gradient_path(zero, waits=waits)):
        units = _fetched(setup, zero, resident_params, decisions)
        yield RivalDecisions.model_validate(
            decisions.model_dump() | {"policy": f"zero-{zero.stage}", "units": units} | options
        )


def _gradient_path(zero: Zero, *, waits: bool) -> GradientPath:
    """Return how gradients leave a device that keeps no optimizer state."""
    if zero.optimizer.device != "none" and not zero.optimizer.pin_memory:
        return GradientPath.ZERO3_PAGEABLE
    return GradientPath.ZERO3_PINNED if waits and zero.stage == 3 else GradientPath.ZERO3_ASYNC


def _placed(setup: Setup, zero: Zero, bucket_params: int, path: GradientPath) -> Iterator[RivalDecisions]:
    """Yield the update places, by the policies of published engines."""
    optimizer = zero.optimizer
    if zero.stage == 3:
        if optimizer.device == "nvme":
            yield from zero_infinity(
                setup, pipeline_read=optimizer.pipeline_read, pipeline_write=optimizer.pipeline_write
            )
        else:
            policy = super_offload if optimizer.super_offload else twin_flow
            for decisions in policy(setup, (optimizer.ratio if optimizer.device == "cpu" else 0.0,)):
                yield decisions.model_copy(update={"gradient_path": path})
        return
    stage: dict[str, Any] = {"zero_stage": zero.stage if setup.given.data_parallel > 1 else 0}
    stage["all_reduces"] = stage["zero_stage"] > 0
    stage["max_prefetch_params"] = None if zero.overlap_comm is True else 0
    if optimizer.device == "none":
        if zero.stage < 2:  # all are reduced after the last micro-batch
            stage |= {"reduce_start": "step", "bucket_params": bucket_params}
        for decisions in list(gpu_only(setup))[:2] if zero.stage else unsharded(setup):
            yield decisions.model_copy(update=stage)
        return
    for decisions in zero_offload(setup, path):
        yield decisions.model_copy(update=stage | _WHOLE)


def _fetched(setup: Setup, zero: Zero, resident_params: int, decisions: RivalDecisions) -> dict[str, UnitDecision]:
    """Return units with the places of their parameters; those with at most so many stay on the device."""
    if zero.params.device == "none" or zero.stage < 3:
        return decisions.units
    found, stay = {}, setup.tied
    for unit in setup.units:
        decided = decisions.units[unit.name]
        where = "nvme" if zero.params.device == "nvme" and set(decided.update) <= {Place.NVME} else "host"
        moves = unit.num_weights > resident_params and unit.name not in stay
        if moves and Place.GPU not in decided.update:
            decided = decided.model_copy(update={"params": where})
        found[unit.name] = decided
    return found
