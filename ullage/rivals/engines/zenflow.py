"""DeepSpeed's ZenFlow: the device updates a few columns of each matrix, the host the rest, every few steps and late."""

import math
from collections.abc import Iterator, Sequence

from planner.decisions import Place
from planner.placements import ACTIVATIONS
from planner.setup import Setup, pieces
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import decide
from ullage.rivals.engines.deepspeed import deepspeed_options

# Steps between the host's updates, as in DeepSpeed's tutorial (``DeepSpeedExamples/training/DeepSpeed-ZenFlow``). By
# default ZenFlow chooses them while it trains. ``topk_ratio`` is DeepSpeed's default.
UPDATE_INTERVALS = (4,)
TOPK_RATIO = 0.1
# Of each selected value the device holds gradient, weight, and two moments in the weights' type
# (``ops/adam/zenflow_torch_adam.py::ZenFlowSelectiveAdamW_stage3``).
_SELECTED_VALUES = 4
# Beside master copy, moments and gradient, the host holds for each parameter two more moments, the gradients of the
# next updates, and a snapshot of the weights (``zenflow_cpu_adam.py``, ``engine_stage3.py::start_optimizer_process``).
_HOST_BYTES = 16
# ``engine_stage3.py::unscale_and_clip_grads`` reads and writes fp32 gradients.
_SCALE_BYTES = 8


def zen_flow(setup: Setup, intervals: Sequence[int] = UPDATE_INTERVALS) -> Iterator[RivalDecisions]:
    """ZenFlow on ZeRO-3 with ``overlap_step``: it changes the update rule.

    ``update_interval`` takes the place of gradient accumulation (``zenflow/engine.py::configure_zenflow``). So every
    step moves gradients as accumulation does, and only the last one of an interval copies the sum to the host in fp32,
    unpinned, while backward waits (``engine_stage3.py::partition_grads``). Then the caller waits for the updates of the
    interval before, uploads their weights, scales the new gradients and lets a worker update beside the next interval
    (``engine_stage3.py::step``): weights are one interval old. The update of the selected columns on the device is not
    priced; it takes milliseconds.

    Args:
        setup: the request.
        intervals: steps between the host's updates.
    """
    shard_params = sum(sum(pieces(setup, unit)) for unit in setup.units)
    options = deepspeed_options(setup, GradientPath.ZERO3_BLOCKING)
    selected_bytes = _SELECTED_VALUES * setup.given.precision.weight_bytes * math.ceil(TOPK_RATIO * shard_params)
    options["device_buffer_bytes"] += selected_bytes
    options |= {"publishes_late": True, "prepare_bytes": _SCALE_BYTES, "host_bytes": _HOST_BYTES}
    for interval in intervals:
        options |= {"num_steps": interval, "num_micro_batches": interval * setup.given.num_micro_batches}
        for activations in ACTIVATIONS:
            yield decide(setup, "zenflow", activations, lambda _: Place.CPU, **options)
