"""RoundPipe: stages of a few layers go to the devices of one node in turn; weights and optimizer are on the host.

Source: github.com/ITcarrot/RoundPipe, ``roundpipe/run.py``, ``transfer.py``, ``roundpipe.py`` and ``scheduler.py``. How
it is lowered: [Note: Round robin] in :mod:`planner.lowering.by_layer`.
"""

from collections import defaultdict
from collections.abc import Iterator

from planner.decisions import Decisions, GradientPath, Place
from planner.engines.policies import decide
from planner.engines.setup import Setup
from planner.habits import Habits

# The next stage is copied while one computes.
_STAGES_ON_DEVICE = 2
# Bytes per parameter: ``_move_grad_to_optim`` reads gradients in the weights' type and writes them in fp32; the update
# reads fp32 gradients; ``sync_optim_param`` copies fp32 weights to those that are fetched.
_FP32_BYTES = 4
# The norm reads gradients, and scaling reads and writes them.
_CLIP_PASSES = 3
# ``models/function.py::ChunkedCompileLinearForCausalLMLoss`` makes logits in chunks.
_HEAD_PERCENT = 5


def round_pipe(setup: Setup, *, publishes_late: bool = True) -> Iterator[Decisions]:
    """RoundPipe with its asynchronous optimizer, which changes numerics: weights are one update old.

    The host updates all layers beside the next iteration (``roundpipe.py::RoundPipe.step``). Each stage's input is kept
    on the host and recomputed from (``run.py::run_backward``). Micro-batches add up on the device.

    Args:
        setup: the request. All ranks are on one node, because one process drives them.
        publishes_late: whether the optimizer is asynchronous; otherwise the next iteration waits for it.
    """
    weight_bytes = setup.precision.weight_bytes
    segments: dict[str, int] = defaultdict(int)
    for unit in setup.units:
        segments[unit.segment] += unit.num_weights
    several = setup.data_parallel > 1
    yield decide(
        setup,
        "roundpipe" if publishes_late else "roundpipe-sync",
        "offload-input",
        lambda _: Place.CPU,
        params="host",
        zero_stage=3 if several else 0,
        gradient_path=GradientPath.BUFFERED,
        overlap_next_forward=publishes_late,
        num_param_slots=_STAGES_ON_DEVICE,
        # Gradients of a stage are whole on its device.
        device_buffer_bytes=_STAGES_ON_DEVICE * weight_bytes * max(segments.values(), default=0) if several else 0,
        habits=Habits(
            layer_by_layer=True,
            publishes_late=publishes_late,
            prepare_bytes=weight_bytes + _FP32_BYTES + (_CLIP_PASSES * _FP32_BYTES if setup.clip else 0),
            publish_bytes=_FP32_BYTES + weight_bytes,
            host_bytes=_FP32_BYTES,
            head_percent=_HEAD_PERCENT,
        ),
    )


def round_pipe_sync(setup: Setup) -> Iterator[Decisions]:
    """RoundPipe with ``step(is_async=False)``: the next iteration waits for the optimizer."""
    return round_pipe(setup, publishes_late=False)
