"""DeepSpeed ZeRO-3 with offloading, in all its forms: Twin-Flow, Super-Offload and ZeRO-Infinity too."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from planner.decisions import Place
from planner.placements import ACTIVATIONS
from planner.setup import Setup
from ullage.rivals.decisions import REDUCE_BUCKET_PARAMS, GradientPath, HostUpdate, RivalDecisions
from ullage.rivals.engines.deciding import decide, num_subgroups

# The fractions to try if the user leaves them to us.
TWIN_FLOW_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# DeepSpeed's default ``stage3_prefetch_bucket_size``. The next parameter is gathered ahead, whatever its size, as long
# as the bucket is not full (``partitioned_param_coordinator.py::fetch_sub_module``). ``MAX_LIVE_PARAMS`` is the bound.
PREFETCH_BUCKET_PARAMS = 50_000_000
# DeepSpeed's default ``stage3_max_reuse_distance``.
MAX_REUSE_PARAMS = 1_000_000_000
# DeepSpeed's default ``stage3_max_live_parameters``: at most so many gathered parameters are kept.
MAX_LIVE_PARAMS = 1_000_000_000


def zero_offload(setup: Setup, gradient_path: GradientPath = GradientPath.ZERO3_ASYNC) -> Iterator[RivalDecisions]:
    """DeepSpeed ZeRO-3 with the optimizer on the CPU: updates overlap with nothing.

    DeepSpeed before 0.19.5, the baseline of every paper, has the blocking gradient path.
    """
    name = "zero-offload" if gradient_path is GradientPath.ZERO3_ASYNC else "zero-offload-blocking"
    for activations in ACTIVATIONS:
        yield decide(setup, name, activations, lambda _: Place.CPU, **deepspeed_options(setup, gradient_path))


def zero_offload_blocking(setup: Setup) -> Iterator[RivalDecisions]:
    """ZeRO-3 offload with blocking, unpinned gradient copies."""
    return zero_offload(setup, GradientPath.ZERO3_BLOCKING)


def with_host_parameters(
    decisions: RivalDecisions, setup: Setup, where: Literal["host", "nvme"] = "host"
) -> RivalDecisions:
    """Return decisions with parameters on the host or on NVMe, such as DeepSpeed's ``offload_param``.

    Each rank keeps its shard of the parameters in pinned host memory and copies it to the device before each all-gather
    (``runtime/zero/partition_parameters.py``). The CPU updates it there. On NVMe, it reads the shard into such memory
    first (``runtime/swap_tensor/partitioned_param_swapper.py``). Parameters that the device updates stay. Of those that
    two units share, a drive has none.
    """
    units = dict(decisions.units)
    for unit in setup.units:
        decided = units[unit.name]
        there = where if where == "host" or unit.name not in setup.tied else "host"
        if unit.num_weights and Place.GPU not in decided.update:
            units[unit.name] = decided.model_copy(update={"params": there})
    return RivalDecisions.model_validate(dict(decisions) | {"units": units})


def twin_flow(setup: Setup, fractions: Sequence[float] = TWIN_FLOW_FRACTIONS) -> Iterator[RivalDecisions]:
    """ZeRO-Offload++: the first subgroups are updated on the device, a fraction of the parameters on the CPU."""
    total = num_subgroups(setup)

    def place(first_on_cpu: int, i: int) -> Place:
        return Place.GPU if i < first_on_cpu else Place.CPU

    for fraction in fractions:
        chosen = functools.partial(place, total - round(total * fraction))
        for activations in ACTIVATIONS:
            options = deepspeed_options(setup, GradientPath.ZERO3_ASYNC)
            yield decide(setup, "twin-flow", activations, chosen, **options)


def super_offload(setup: Setup, fractions: Sequence[float] = (*TWIN_FLOW_FRACTIONS, 1.0)) -> Iterator[RivalDecisions]:
    """DeepSpeed's Super-Offload: a process of its own updates each subgroup during backward, if nothing is clipped.

    It is a ZeRO-3 engine with the ratio of Twin-Flow. If gradients are clipped, all updates wait until backward has
    ended (``runtime/superoffload/superoffload_stage3.py``).
    """
    for decisions in twin_flow(setup, fractions):
        update = {"policy": "super-offload", "host_update": HostUpdate.SUPER_OFFLOAD}
        if not setup.given.clip:
            update |= {"update_start": "backward", "update_order": "backward"}
        yield decisions.model_copy(update=update)


def zero_infinity(
    setup: Setup, *, pipeline_read: bool = False, pipeline_write: bool = False
) -> Iterator[RivalDecisions]:
    """DeepSpeed ZeRO-Infinity: optimizer state on NVMe, parameters on the device.

    Gradients leave the device through pinned buffers, and are written to NVMe during backward. At the step, every
    subgroup's state and gradient are read, updated and written in turn, unless settings let the next read or the
    previous write overlap (``stage3.py`` and ``partitioned_optimizer_swapper.py``).
    """
    for activations in ACTIVATIONS:
        yield decide(
            setup,
            "zero-infinity",
            activations,
            lambda _: Place.NVME,
            **deepspeed_options(setup, GradientPath.ZERO3_PINNED),
            spill_gradients=True,
            num_nvme_slots=1 + pipeline_read + pipeline_write,
        )


def deepspeed_options(setup: Setup, gradient_path: GradientPath) -> dict[str, Any]:
    """Return the options that all ZeRO-3 engines of DeepSpeed have in common, at DeepSpeed's defaults."""
    return {
        "device_buffer_bytes": reduce_buffer_bytes(setup),
        "overlap_next_forward": False,
        "host_update": HostUpdate.DEEPSPEED,
        "max_live_params": MAX_LIVE_PARAMS,
        "max_reuse_params": MAX_REUSE_PARAMS,
        "module_hooks": True,
        "num_param_slots": num_live_segments(setup),
        "gradient_path": gradient_path,
        "update_order": "forward",
        "zero_stage": 3,
    }


def reduce_buffer_bytes(setup: Setup, bucket_params: int = REDUCE_BUCKET_PARAMS) -> int:
    """Return the device memory that DeepSpeed reduces gradients in.

    Gradients are copied into a flat bucket, even on one rank (``stage3.py::__add_grad_to_ipg_bucket``). The input of a
    reduction over several ranks is made from it (``coalesced_collectives.py::reduce_scatter_coalesced``).
    """
    return (2 if setup.given.data_parallel > 1 else 1) * bucket_params * setup.given.precision.weight_bytes


def num_live_segments(setup: Setup, max_live_params: int = MAX_LIVE_PARAMS) -> int:
    """Return the number of layers whose gathered parameters DeepSpeed keeps, beside the embedding and the head."""
    segments: dict[str, int] = defaultdict(int)
    ends = 0
    for unit in setup.units:
        if unit.in_layer:
            segments[unit.segment] += unit.num_weights
        else:
            ends += unit.num_weights
    return max((max_live_params - ends) // max([1, *segments.values()]), 2)
