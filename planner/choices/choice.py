"""The choices before placement: degrees of parallelism, and how a batch is divided into micro-batches.

Values that the user gives are fixed. For the others, all sensible values are tried: degrees that divide
the number of devices (tensor parallelism only within a node), and micro-batches of a power of two that divide the
global batch. Degrees are compared only if the user gives a global batch: without one, it would depend on data
parallelism.
"""

import itertools
from collections.abc import Iterator
from typing import Literal, get_args

from planner.choices.constraints import MOST_MICRO_BATCHES
from planner.choices.request import Request
from planner.decisions import Choice
from planner.graph import Batch
from planner.models.captured import CapturedModel, Model
from planner.models.config import Family, ModelConfigError
from planner.models.formulas import context, experts
from planner.models.formulas.kernel_sets import NARROW
from planner.models.parameters import layer_shapes
from planner.models.sharding import share
from planner.terms import default_micro_batch

# The least parameters of a unit of experts; smaller units are not worth moving and would make schedules long.
_UNIT_PARAMS, _MOST_UNITS = 100_000_000, 8


def choices(request: Request) -> tuple[Choice, ...]:
    """Return all choices to try; see the module.

    Raises:
        ValueError: there is none; the message says why.
    """
    tensor, stages = request.tensor_parallel or 1, request.pipeline_parallel or 1
    if request.num_devices % (tensor * stages):
        raise ValueError(
            f"tensor {tensor} x pipeline {stages} must divide the {request.num_devices} device(s); change --parallel "
            "or --gpus"
        )
    model = request.model
    if isinstance(model, CapturedModel):
        _check_captured(request, model)
    found: list[Choice] = []
    reasons: list[ValueError] = []
    can_be_shared = False
    for tensor, pipeline in itertools.product(*_ways(request)):
        if request.num_devices % (tensor * pipeline):
            continue
        data = request.num_devices // (tensor * pipeline)
        for expert, (sharing, exchange), (rounds, order) in itertools.product(
            _expert_ways(request, data, pipeline),
            _context_ways(request, data, pipeline),
            _stage_ways(request, pipeline),
        ):
            degrees = Choice(
                data_parallel=data,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                pipeline_rounds=rounds,
                pipeline_order=order,
                expert_parallel=expert,
                context_parallel=sharing,
                context_exchange=exchange,
                kernels=None if request.kernels == "auto" else request.kernels,
            )
            try:
                _check(model, degrees, request.seq_len)
            except ValueError as error:
                reasons.append(error)
                continue
            can_be_shared = True
            own = {"expert_units": request.expert_units or _expert_units(model, expert)}
            found += [
                degrees.model_copy(update=own | {"micro_batch": size, "num_micro_batches": count})
                for size, count in _cuts(request, degrees)
            ]
    if not found:
        if not can_be_shared:
            raise reasons[0]
        raise ValueError(
            f"a global batch of {request.global_batch} sequences cannot be cut into equal micro-batches for "
            f"{request.num_devices} devices with the given degrees and sizes; choose a multiple of the data-parallel "
            f"ranks, in at most {MOST_MICRO_BATCHES} micro-batches each, or let ranks share sequences (--parallel "
            "context=)"
        )
    turns = [choice for alone in found for choice in _in_turn(request, alone)]
    return tuple(found + turns)


def _check_captured(request: Request, model: CapturedModel) -> None:
    """Check that the request does not need a captured model at another degree or batch size."""
    for kind in ("tensor", "expert", "context"):
        if (getattr(request, f"{kind}_parallel") or 1) > 1:
            masked = any(spec.name == "attention_mask" for spec in model.inputs) and ":" not in model.factory
            remedy = "leave out the mask (batches masked), or that" if masked else "leave it out"
            raise ValueError(
                f"{kind}_parallel {getattr(request, f'{kind}_parallel')}: {model.name} was captured whole, so ranks "
                f"cannot share its layers, as they share those of {', '.join(get_args(Family))} without adapters; "
                f"{remedy}: then ranks share weights and state. Stages can share its layers (--parallel pipeline=)"
            )
    if (request.pipeline_parallel or 1) > 1 and (model.calls or model.second_order):
        raise ValueError(
            f"pipeline_parallel {request.pipeline_parallel}: {model.name} does more in a step than one forward and "
            "backward, so it cannot be cut into stages; leave it out"
        )


def _ways(request: Request) -> tuple[list[int], list[int]]:
    """Return the degrees of tensor and of pipeline parallelism to try."""
    divisors = [n for n in range(1, request.num_devices + 1) if request.num_devices % n == 0]
    if request.global_batch is None or isinstance(request.model, CapturedModel):
        divisors = [1]
    # With narrow products there are no parts of matrices; see :func:`planner.models.formulas.float8.check`.
    is_whole = request.types.products or request.kernels in NARROW
    per_node = 1 if is_whole else request.hardware.devices_per_node
    tensor = [n for n in divisors if per_node % n == 0]
    return (
        [request.tensor_parallel] if request.tensor_parallel else tensor,
        [request.pipeline_parallel] if request.pipeline_parallel else divisors,
    )


def _in_turn(request: Request, alone: Choice) -> Iterator[Choice]:
    """Yield the choices in which layers move from device to device, and the same sequences pass them.

    Where devices exchange data through the host's links, data-parallel ranks bring each weight there several times.
    Here it comes once, however small the micro-batches are. So they may also be of one sequence, which needs least.

    Args:
        request: which leaves the degrees open.
        alone: the choice of data-parallel ranks.
    """
    count, fabric, model = request.num_devices, request.hardware.intra_node, request.model
    degrees = (request.tensor_parallel, request.pipeline_parallel, request.expert_parallel, request.context_parallel)
    is_open = not (any(degrees) or request.global_batch or request.segment_tile_sequences)
    in_node = 1 < count <= request.hardware.devices_per_node and fabric is not None and fabric.via_host_link
    if isinstance(model, CapturedModel) or not (is_open and in_node and model.num_layers >= 2 * count):
        return
    update = {"data_parallel": 1, "pipeline_parallel": count, "pipeline_rounds": model.num_layers // count}
    for size in dict.fromkeys((alone.micro_batch, 1)):
        repeats = count * alone.num_micro_batches * alone.micro_batch // size
        yield alone.model_copy(update=update | {"micro_batch": size, "num_micro_batches": repeats})


def _stage_ways(request: Request, pipeline: int) -> list[tuple[int, Literal["zero-bubble"] | None]]:
    """Return the rounds and orders of a pipeline to try.

    Rounds are one, and as many as there are layers, so that each comes alone.
    """
    model, counts = request.model, [request.pipeline_rounds or 1]
    is_open = request.global_batch is not None and request.pipeline_rounds is None
    if is_open and not isinstance(model, CapturedModel) and model.num_layers // pipeline > 1 < pipeline:
        counts.append(model.num_layers // pipeline)
    orders: list[Literal["zero-bubble"] | None] = [None] if request.pipeline_order != "zero-bubble" else []
    if request.pipeline_order != "1f1b" and (pipeline > 1 or not orders):
        orders.append("zero-bubble")
    return list(itertools.product(counts, orders))


def _expert_ways(request: Request, data: int, pipeline: int) -> list[int]:
    model = request.model
    if request.expert_parallel:
        return [request.expert_parallel]
    if pipeline > 1 or request.global_batch is None or isinstance(model, CapturedModel) or not model.is_expert_model:
        return [1]
    return [2**i for i in range(data.bit_length()) if data % 2**i == 0 and model.num_experts % 2**i == 0]


def _context_ways(request: Request, data: int, pipeline: int) -> list[tuple[int, Literal["ring"] | None]]:
    """Return how many ranks share sequences, and how they exchange."""
    if request.context_parallel:
        counts = [request.context_parallel]
    elif pipeline > 1 or request.global_batch is None or isinstance(request.model, CapturedModel):
        counts = [1]
    else:
        counts = [2**i for i in range(data.bit_length()) if data % 2**i == 0]
    asked = request.context_exchange
    ways: list[Literal["ring"] | None] = [None] if asked != "ring" else []
    if asked != "all-to-all":
        ways.append("ring")
    alone = ways[:1] if counts == [1] else [None]  # a ring of one rank is a contradiction, if it is all that is asked
    return [(count, way) for count in counts for way in (ways if count > 1 else alone)]


def _cuts(request: Request, degrees: Choice) -> Iterator[tuple[int, int]]:
    """Yield sizes and numbers of micro-batches.

    Ranks that share sequences compute one at a time: several would rather be divided among fewer ranks, which
    exchange less.
    """
    data, pipeline = degrees.num_readers, degrees.pipeline_parallel
    if request.global_batch is None:
        yield request.micro_batch or default_micro_batch(request.seq_len), request.num_micro_batches or 1
        return
    if request.global_batch % data:
        return
    each = request.global_batch // data
    sizes = [2**i for i in range(each.bit_length() if degrees.context_parallel == 1 else 1)]
    for size in [request.micro_batch] if request.micro_batch else sizes:
        count, rest = divmod(each, size)
        # With fewer micro-batches than stages, some stages are always idle.
        filled = pipeline == 1 or count >= pipeline or request.pipeline_parallel
        if not rest and filled and count <= MOST_MICRO_BATCHES and request.num_micro_batches in {None, count}:
            yield size, count


def _check(model: Model, degrees: Choice, seq_len: int) -> None:
    """Check that a model can be divided by these degrees.

    Raises:
        ValueError: naming the number, the rule and the remedy.
    """
    if not isinstance(model, CapturedModel):
        batch = Batch(
            1,
            seq_len,
            tensor_parallel=degrees.tensor_parallel,
            expert_parallel=degrees.expert_parallel,
            context_parallel=degrees.context_parallel,
            passes_keys=degrees.context_exchange is not None,
        )
        experts.check(model, batch)
        context.check(share(model, batch), batch)
        if degrees.pipeline_parallel * degrees.pipeline_rounds > model.num_layers:
            rounds = f" in {degrees.pipeline_rounds} rounds" if degrees.pipeline_rounds > 1 else ""
            raise ModelConfigError(
                f"{model.name} has {model.num_layers} layers, which {degrees.pipeline_parallel} pipeline stages cannot "
                f"share{rounds}; choose fewer"
            )
    if degrees.contradiction:
        raise ModelConfigError(degrees.contradiction)


def _expert_units(model: Model, expert_parallel: int) -> int:
    """Return the number of units into which a rank's experts of a layer are divided, so that each is worth moving."""
    if isinstance(model, CapturedModel) or not model.is_expert_model:
        return 1
    layer = next(i for i in range(model.num_layers) if model.has_experts(i))
    bank = sum(shape[0] * shape[1] * shape[2] for name, shape in layer_shapes(model, layer) if ".experts." in name)
    num_experts = model.num_experts // expert_parallel
    return max(min(bank // expert_parallel // _UNIT_PARAMS, num_experts, _MOST_UNITS), 1)
