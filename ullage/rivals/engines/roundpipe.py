"""RoundPipe: stages of a few layers go to the devices of one node in turn; weights and optimizer are on the host.

Source: github.com/ITcarrot/RoundPipe, ``roundpipe/run.py``, ``transfer.py``, ``roundpipe.py`` and ``scheduler.py``.

RoundPipe cuts the model into stages of a few layers and hands them to its devices in turn. A stage is copied to its
device, all micro-batches pass it, and it leaves again. So every device works on another stage at any time, and its
share of copies and computing is that of one rank that computes every segment for its share of the micro-batches with
its share of the parameters' copies. That rank is what is lowered. Inputs of stages, their outputs, and the gradients of
both travel through the host (``roundpipe/run.py``).

What such a rank does not show is how the pipe fills and drains. The first stages of an iteration follow the last ones
of the iteration before (``roundpipe.py::RoundPipe.forward_backward`` waits only for the loss), so this costs nothing if
weights may be one update old. Otherwise a device waits in every iteration while one micro-batch passes as many stages
as there are other devices. RoundPipe cuts the whole node's batch into micro-batches of its own, a few more than there
are devices. With accumulation, it waits for the loss of each round, so all rounds together wait as long as one of the
whole batch. The first tasks of the schedule take that time: forwards of the layers of a stage.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from planner.decisions import Place
from planner.lowering.compute import lay_backward
from planner.lowering.program import Program
from planner.schedule.tasks import Lane, Op, Phase
from planner.setup import Setup
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import decide

SEGMENTS_OF_STAGE = 3
"""Segments in a stage of forward, of which backward has one."""

# Micro-batches beyond the number of devices into which its published runs cut a batch (``roundpipe/run.sh`` of
# github.com/ITcarrot/RoundPipe-artifact: 10 for 8 devices).
_MORE_MICRO_BATCHES = 2
# The next stage is copied while one computes.
_STAGES_ON_DEVICE = 2
# Hidden states beside those of the micro-batch that computes: of the next one, its input and the gradient of its output
# come to the device, and the gradient of the last one's input leaves it (``run.py::run_backward``).
_UNDER_WAY = 3
# Backward over forward, before RoundPipe has timed a layer (``timer.py::ModelTimer``).
_BACKWARD_OVER_FORWARD = 3
# Bytes per parameter: ``_move_grad_to_optim`` reads gradients in the weights' type and writes them in fp32; the update
# reads fp32 gradients; ``sync_optim_param`` copies fp32 weights to those that are fetched.
_FP32_BYTES = 4
# The norm reads gradients, and scaling reads and writes them.
_CLIP_PASSES = 3
# ``models/function.py::ChunkedCompileLinearForCausalLMLoss`` makes logits in chunks.
_HEAD_PERCENT = 5


def round_pipe(setup: Setup, *, publishes_late: bool = True) -> Iterator[RivalDecisions]:
    """RoundPipe with its asynchronous optimizer, which changes numerics: weights are one update old.

    The host updates all layers beside the next iteration (``roundpipe.py::RoundPipe.step``). Each stage's input is kept
    on the host and recomputed from (``run.py::run_backward``). Micro-batches add up on the device.

    Args:
        setup: the request. All ranks are on one node, because one process drives them.
        publishes_late: whether the optimizer is asynchronous; otherwise the next iteration waits for it.
    """
    weight_bytes = setup.given.precision.weight_bytes
    segments: dict[str, int] = defaultdict(int)
    trained: dict[str, int] = defaultdict(int)
    for unit in setup.units:
        segments[unit.segment] += unit.num_weights
        trained[unit.segment] += unit.num_params
    layers = {unit.segment for unit in setup.units if unit.in_layer}
    num_hidden = _UNDER_WAY + _num_held_inputs(segments, layers)
    several = setup.given.data_parallel > 1
    stages_bytes = _STAGES_ON_DEVICE * weight_bytes * max(trained.values(), default=0) if several else 0
    hidden_bytes = max((unit.activation_output_bytes for unit in setup.units if unit.in_layer), default=0)
    yield decide(
        setup,
        "roundpipe" if publishes_late else "roundpipe-sync",
        "recompute",
        lambda _: Place.CPU,
        params="host",
        inputs_on_host=True,
        zero_stage=3 if several else 0,
        gradient_path=GradientPath.BUFFERED,
        overlap_next_forward=publishes_late,
        num_param_slots=_STAGES_ON_DEVICE,
        device_buffer_bytes=stages_bytes + num_hidden * hidden_bytes,  # gradients of a stage are whole on its device
        layer_by_layer=True,
        publishes_late=publishes_late,
        prepare_bytes=weight_bytes + _FP32_BYTES + (_CLIP_PASSES * _FP32_BYTES if setup.given.clip else 0),
        publish_bytes=_FP32_BYTES + weight_bytes,
        host_bytes=_FP32_BYTES,
        head_percent=_HEAD_PERCENT,
    )


def _num_held_inputs(segments: Mapping[str, int], layers: Collection[str]) -> int:
    """Return the inputs of layers that a device holds beside that of the layer whose backward it computes.

    They are those of a stage of backward, and of the stage of forward before it: what one stream leaves to another is
    freed when a later copy makes the first wait for it (``device.py::InterStreamMemManager``). Most layers are in a
    stage in the first iteration. There, times are taken for proportional to weights, and a stage is as long as the
    longest backward (``scheduler.py::ModelExecutePlan.auto``): if the vocabulary is large, that of the head.

    Args:
        segments: parameters of each segment.
        layers: the segments that are layers.
    """
    largest, layer = max(segments.values(), default=0), max((segments[name] for name in layers), default=0)
    if not layer:
        return 0
    of_forward = min(_BACKWARD_OVER_FORWARD * largest // layer, len(layers))
    return of_forward + min(largest // layer, len(layers)) - 1


def round_pipe_sync(setup: Setup) -> Iterator[RivalDecisions]:
    """RoundPipe with ``step(is_async=False)``: the next iteration waits for the optimizer."""
    return round_pipe(setup, publishes_late=False)


def lay_by_layer(decisions: RivalDecisions, program: Program) -> None:
    """Append all micro-batches segment by segment; the last segment's forward and backward are together."""
    count = decisions.num_micro_batches
    *others, last = program.segments
    for segment in others:
        for micro_batch in range(count):
            for unit in segment:
                program.lay(unit.forwards, Op.FORWARD, unit, micro_batch)
    for segment in (last, *reversed(others)):
        for micro_batch in range(count):
            for unit in segment if segment is last else ():
                program.lay(unit.forwards, Op.FORWARD, unit, micro_batch)
            lay_backward(program, segment, micro_batch)
    if not decisions.publishes_late:
        _fill(program)


def _fill(program: Program) -> None:
    """Let the device wait until the pipe is full."""
    ranks, count = program.decisions.data_parallel, program.decisions.num_micro_batches
    num_waits = round((ranks - 1) * ranks * count / (ranks + _MORE_MICRO_BATCHES))
    for segment in program.segments[1 : 1 + SEGMENTS_OF_STAGE]:
        for unit in segment:
            for _ in range(num_waits):
                wait = program.draft(Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, unit)
                program.before[program.spine[0].index].append(wait)
