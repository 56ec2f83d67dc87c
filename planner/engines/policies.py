"""Engine policies: how published engines, and ours, would place one model on one machine.

A policy only makes :class:`planner.decisions.Decisions`. The same passes lower them all and the same simulator scores
them, so "how long would DeepSpeed take here?" is the same question as "how long would we take?".
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from planner.decisions import (
    REDUCE_BUCKET_PARAMS,
    Activations,
    Decisions,
    GradientPath,
    HostUpdate,
    Place,
    UnitDecision,
)
from planner.engines.setup import Mix, Setup, pieces
from planner.optimizers import OPTIMIZERS

# The fractions and strides to try if a policy leaves them to its user.
TWIN_FLOW_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
INTERLEAVED_STRIDES = (2, 3, 4, 5, 6, 8, 10)


def gpu_only(setup: Setup) -> Iterator[Decisions]:
    """Plain training: everything on the device; over several devices as ZeRO-1, 2 or 3 (FSDP)."""
    for stage in (1, 2, 3) if setup.data_parallel > 1 else (0,):
        for activations in ACTIVATIONS:
            yield decide(setup, "gpu-only", activations, lambda _: Place.GPU, zero_stage=stage, **AFTER_BACKWARD)


def zero_offload(setup: Setup, gradient_path: GradientPath = GradientPath.ZERO3_ASYNC) -> Iterator[Decisions]:
    """DeepSpeed ZeRO-3 with the optimizer on the CPU: updates overlap with nothing.

    DeepSpeed before 0.19.5, the baseline of every paper, has the blocking gradient path.
    """
    name = "zero-offload" if gradient_path is GradientPath.ZERO3_ASYNC else "zero-offload-blocking"
    for activations in ACTIVATIONS:
        yield decide(setup, name, activations, lambda _: Place.CPU, **deepspeed_options(setup, gradient_path))


def zero_offload_blocking(setup: Setup) -> Iterator[Decisions]:
    """ZeRO-3 offload with blocking, unpinned gradient copies."""
    return zero_offload(setup, GradientPath.ZERO3_BLOCKING)


def with_host_parameters(decisions: Decisions, setup: Setup, where: Literal["host", "nvme"] = "host") -> Decisions:
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
    return Decisions.model_validate(dict(decisions) | {"units": units})


def fsdp2_offload(setup: Setup) -> Iterator[Decisions]:
    """FSDP2 with ``CPUOffloadPolicy``: master copies in pinned host memory, fetched in fp32 for every use.

    A layer is cast on the device and then all-gathered, while the layer before it computes. The fused AdamW of PyTorch
    updates all parameters on the CPU when backward has ended (``torch/distributed/fsdp/_fully_shard``).
    """
    # One layer's shard waits in fp32 on the device until it is cast.
    fp32_bytes = 4 * max((-(-unit.num_params // setup.replicas(unit)) for unit in setup.units), default=0)
    for activations in ACTIVATIONS:
        yield decide(
            setup,
            "fsdp2-offload",
            activations,
            lambda _: Place.CPU,
            params="host",
            zero_stage=3 if setup.data_parallel > 1 else 0,
            gradient_path=GradientPath.FSDP2,
            device_buffer_bytes=fp32_bytes,
            **AFTER_BACKWARD,
        )


def twin_flow(setup: Setup, fractions: Sequence[float] = TWIN_FLOW_FRACTIONS) -> Iterator[Decisions]:
    """ZeRO-Offload++: the first subgroups are updated on the device, a fraction of the parameters on the CPU."""
    total = num_subgroups(setup)

    def place(first_on_cpu: int, i: int) -> Place:
        return Place.GPU if i < first_on_cpu else Place.CPU

    for fraction in fractions:
        chosen = functools.partial(place, total - round(total * fraction))
        for activations in ACTIVATIONS:
            options = deepspeed_options(setup, GradientPath.ZERO3_ASYNC)
            yield decide(setup, "twin-flow", activations, chosen, **options)


def super_offload(setup: Setup, fractions: Sequence[float] = (*TWIN_FLOW_FRACTIONS, 1.0)) -> Iterator[Decisions]:
    """DeepSpeed's Super-Offload: a process of its own updates each subgroup during backward, if nothing is clipped.

    It is a ZeRO-3 engine with the ratio of Twin-Flow. If gradients are clipped, all updates wait until backward has
    ended (``runtime/superoffload/superoffload_stage3.py``).
    """
    for decisions in twin_flow(setup, fractions):
        update = {"policy": "super-offload", "host_update": HostUpdate.SUPER_OFFLOAD}
        if not setup.clip:
            update |= {"update_start": "backward", "update_order": "backward"}
        yield decisions.model_copy(update=update)


def interleaved(
    setup: Setup, strides: Sequence[int] = INTERLEAVED_STRIDES, cpu_fraction: float = 1.0
) -> Iterator[Decisions]:
    """Deep Optimizer States: every k-th subgroup is streamed to the device and updated there, one in flight.

    It is built on DeepSpeed ZeRO-3. ``cpu_fraction`` < 1 keeps the first subgroups on the device, as Twin-Flow does.
    """
    total = num_subgroups(setup)
    first = total - round(total * cpu_fraction)

    def place(stride: int, i: int) -> Place:
        return Place.GPU if i < first else Place.STREAM if i % stride == stride - 1 else Place.CPU

    engine = deepspeed_options(setup, GradientPath.ZERO3_ASYNC)
    # Its one slot holds a whole subgroup. In our schedule the pieces of that subgroup pass through slots.
    piece = max((size for unit in setup.units for size in pieces(setup, unit)), default=0)
    slot_bytes = round(OPTIMIZERS[setup.optimizer].state_bytes_per_param * (setup.subgroup_params - piece))
    for stride in strides:
        options = engine | {"host_update": HostUpdate.DEVICE_CAST, "num_state_slots": 1}
        if total >= stride:
            options["device_buffer_bytes"] = engine["device_buffer_bytes"] + slot_bytes
        for activations in ACTIVATIONS:
            yield decide(setup, "interleaved", activations, functools.partial(place, stride), **options)


def zero_infinity(setup: Setup, *, pipeline_read: bool = False, pipeline_write: bool = False) -> Iterator[Decisions]:
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


def ratel(setup: Setup, counts: Sequence[int] | None = None, num_on_host: int | None = None) -> Iterator[Decisions]:
    """LoHan (Ratel): parameters and optimizer state on NVMe, updates during backward, activations swapped.

    As soon as a unit's gradient is on the host, its state is read, updated and written back, while backward goes on
    (*active gradient offloading*). One subgroup is read or written while another is updated. Some activations are
    swapped, and the rest is recomputed (arXiv 2403.06504); an iteration-time model chooses how many.

    Args:
        setup: the request; it must not clip, because updates start before all gradients are there.
        counts: numbers of segments, from the first, whose activations are swapped; by default every number is tried.
        num_on_host: swapped segments that stay on the host; the first ones go on to NVMe. By default all stay.
    """
    segments = setup.swappable
    shared = setup.tied
    streamed = decide(
        dataclasses.replace(setup, clip=False),
        "ratel",
        "recompute",
        lambda _: Place.NVME,
        zero_stage=3 if setup.data_parallel > 1 else 0,
        update_start="backward",
        update_order="backward",
        pinned_reads=False,
    )
    for count in range(len(segments) + 1) if counts is None else counts:
        on_nvme = count - min(count, len(segments) if num_on_host is None else num_on_host)
        where: dict[str, Activations] = dict.fromkeys(segments[:count], "offload")
        where |= dict.fromkeys(segments[:on_nvme], "offload-nvme")
        units = {
            unit.name: UnitDecision(
                params="nvme" if unit.num_weights and unit.name not in shared else "gpu",
                activations=where.get(unit.segment, streamed.units[unit.name].activations),
                update=streamed.units[unit.name].update,
            )
            for unit in setup.units
        }
        yield streamed.model_copy(update={"units": units})


def mixed(setup: Setup, mix: Mix) -> Decisions:
    """Our policy at one point: every update has its own place, and only its unit's next forward waits for it.

    Resident state goes to the units with the earliest deadlines: the first in forward order, and within a layer the
    most visited experts. Gradients of streamed subgroups stay on the device for the first units too, because they are
    made last and used first. Streamed subgroups are spread evenly among those that the CPU updates, so that both stay
    busy. Subgroups from NVMe, fetched units (unless the last ones are fetched) and offloading segments are spread
    evenly too. Units with a shared weight, and units updated on the device, keep their parameters there. So do very
    small units: anywhere else they would take a slot and a turn for almost nothing.

    Each mix is made once, because a search meets the same mixes again and again.
    """
    known = setup.known_mixes
    if (found := known.get(mix)) is None:
        found = known[mix] = _mixed(setup, mix)
    return found


def _mixed(setup: Setup, mix: Mix) -> Decisions:
    counts = setup.movable
    fixed = setup.tied
    order = setup.in_turn
    fetchable = [
        unit.name in setup.large
        and unit.name not in fixed
        and (mix.zero_stage not in {1, 2} or setup.replicas(unit) == 1)
        for unit in order
    ]
    first_there = len(order) - min(mix.num_on_nvme, mix.num_host)
    there = [fetchable[i] and i >= first_there for i in range(len(order))]
    num_there = sum(counts[unit.name] for unit, whole in zip(order, there, strict=True) if whole)
    places = _spread(sum(counts.values()) - num_there, mix.num_gpu, mix.num_stream, max(mix.num_nvme - num_there, 0))
    ways = _activations(setup, mix)
    updates: dict[str, tuple[Place, ...]] = {}
    for unit, whole in zip(order, there, strict=True):
        if whole:
            updates[unit.name] = (Place.NVME,) * len(pieces(setup, unit))
        else:
            update = tuple(itertools.islice(places, counts[unit.name]))
            count = len(pieces(setup, unit))
            updates[unit.name] = update + update[-1:] * (count - len(update)) if update else (Place.GPU,) * count
    streaming = [unit.name for unit in order if Place.STREAM in updates[unit.name]]
    staying = set(streaming[: mix.num_stay])
    on_nvme = {unit.name for unit, whole in zip(order, there, strict=True) if whole}
    on_host = [
        unit.name
        for unit, can in zip(order, fetchable, strict=True)
        if can and unit.name not in on_nvme and Place.GPU not in updates[unit.name]
    ]
    num_host = mix.num_host - len(on_nvme)
    chosen = (
        _evenly(len(on_host), num_host) if mix.spread else [i >= len(on_host) - num_host for i in range(len(on_host))]
    )
    on_host = list(itertools.compress(on_host, chosen))
    where: dict[str, Any] = dict.fromkeys(on_host, "host") | dict.fromkeys(on_nvme, "nvme")
    units = {
        unit.name: _decided(
            params=where.get(unit.name, "gpu"),
            activations=ways.get(unit.segment, "keep"),
            update=updates[unit.name],
            streamed_gradients="gpu" if unit.name in staying else "host",
        )
        for unit in order
    }
    return Decisions(
        **setup.ours,
        policy="ullage",
        zero_stage=mix.zero_stage,
        num_param_slots=mix.num_slots,
        num_state_slots=mix.num_state_slots,
        num_gradient_slots=mix.num_gradient_slots,
        num_nvme_slots=mix.num_nvme_slots,
        spill_gradients=mix.spill > 0,
        update_start="step" if setup.clip else "backward",
        update_order="forward" if setup.clip else "backward",
        units=units,
    )


def num_subgroups(setup: Setup) -> int:
    """Return the number of subgroups of one rank's parameters, if they are cut across units."""
    return -(-sum(sum(pieces(setup, unit)) for unit in setup.units) // setup.subgroup_params)


def _spread(total: int, num_gpu: int, num_stream: int, num_nvme: int) -> Iterator[Place]:
    num_gpu = min(num_gpu, total)
    yield from (Place.GPU,) * num_gpu
    streamed = _evenly(total - num_gpu, num_stream)
    from_nvme = iter(_evenly(streamed.count(False), num_nvme))
    for here in streamed:
        yield Place.STREAM if here else Place.NVME if next(from_nvme) else Place.CPU


def _activations(setup: Setup, mix: Mix) -> dict[str, Activations]:
    """Return the decision on activations of every segment that can recompute or offload them."""
    found: dict[str, Activations] = dict.fromkeys(setup.swappable, "keep")
    rest = list(found)[: max(len(found) - mix.num_keep, 0)]
    leave = dict(zip(rest, _evenly(len(rest), mix.num_offload), strict=True))
    evicted = iter(_evenly(sum(leave.values()), mix.num_evict))
    for segment, leaves in leave.items():
        found[segment] = "recompute" if not leaves else "offload-nvme" if next(evicted) else "offload"
    return found


def _evenly(total: int, count: int) -> list[bool]:
    """Choose ``count`` of ``total`` items in a row, evenly spaced (Bresenham)."""
    count = min(count, total)
    return [(i + 1) * count // total > i * count // total for i in range(total)]


_decided = functools.lru_cache(4096)(UnitDecision)  # most units have equal decisions, in all mixes of a search
ACTIVATIONS: tuple[Activations, ...] = ("keep", "recompute")
"""What users choose between: activations are recomputed where keeping them does not fit."""
AFTER_BACKWARD: dict[str, Any] = {"overlap_next_forward": False}
"""Options of engines whose next forward waits for all updates."""
# DeepSpeed's default ``stage3_prefetch_bucket_size``. The next parameter is gathered ahead, whatever its size, as long
# as the bucket is not full (``partitioned_param_coordinator.py::fetch_sub_module``). ``MAX_LIVE_PARAMS`` is the bound.
PREFETCH_BUCKET_PARAMS = 50_000_000
# DeepSpeed's default ``stage3_max_reuse_distance``.
MAX_REUSE_PARAMS = 1_000_000_000
# DeepSpeed's default ``stage3_max_live_parameters``: at most so many gathered parameters are kept.
MAX_LIVE_PARAMS = 1_000_000_000


def deepspeed_options(setup: Setup, gradient_path: GradientPath) -> dict[str, Any]:
    """Return the options that all ZeRO-3 engines of DeepSpeed have in common, at DeepSpeed's defaults."""
    return {
        "device_buffer_bytes": reduce_buffer_bytes(setup),
        "overlap_next_forward": False,
        "host_update": HostUpdate.DEEPSPEED,
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
    return (2 if setup.data_parallel > 1 else 1) * bucket_params * setup.precision.weight_bytes


def num_live_segments(setup: Setup, max_live_params: int = MAX_LIVE_PARAMS) -> int:
    """Return the number of layers whose gathered parameters DeepSpeed keeps, beside the embedding and the head."""
    segments: dict[str, int] = defaultdict(int)
    ends = 0
    for unit in setup.units:
        if unit.in_layer:
            segments[unit.segment] += unit.num_weights
        else:
            ends += unit.num_weights
    return max((max_live_params - ends) // max(segments.values(), default=1), 2)


def decide(
    setup: Setup,
    policy: str,
    activations: Activations,
    place: Callable[[int], Place],
    *,
    params: Literal["gpu", "host"] = "gpu",
    **options: object,
) -> Decisions:
    """Return decisions that treat all units equally; ``place`` maps a subgroup's number to its place.

    These engines cut subgroups across units, we cut them within units. Each of our pieces counts for the subgroup in
    which it begins.
    """
    units: dict[str, UnitDecision] = {}
    offset = 0
    for unit in setup.units:
        sizes = pieces(setup, unit)
        starts = itertools.accumulate(sizes, initial=offset)
        units[unit.name] = UnitDecision(
            params=params if unit.num_weights else "gpu",
            activations=activations if unit.can_swap else "keep",
            update=tuple(place(start // setup.subgroup_params) for start, _ in zip(starts, sizes, strict=False)),
            streamed_gradients="gpu",  # Deep Optimizer States leaves them where they are
        )
        offset += sum(sizes)
    return Decisions.model_validate(
        {
            **setup.given,
            "policy": policy,
            "units": units,
            **options,
        }
    )
