"""MegaTrain: weights on the host, layers streamed through each device, updates on the host when backward has ended.

Source: github.com/DLYuanGod/MegaTrain, ``infinity/model/cpu_master.py`` and ``examples/train.py``; of several devices
``mp_worker.py`` and ``mp_state.py`` beside the first.
"""

from collections import defaultdict
from collections.abc import Iterator

from planner.decisions import Place
from planner.lowering.compute import AGAIN, lay_backward
from planner.lowering.program import Program
from planner.schedule.tasks import Op
from planner.setup import Setup
from ullage.rivals.decisions import GradientPath, HostUpdate, RivalDecisions
from ullage.rivals.engines.deciding import decide

# Layers from one kept input to the next: the default, and as many as large models need.
_BLOCKS = (4, 8)
# Two buffers and two templates of a layer: a layer is copied to a buffer two layers before it is used, because a buffer
# is free as soon as it has been copied to its template.
_LAYERS_ON_DEVICE, _SLOTS = 4, 3
# A template is free when its gradients have left: backward runs two layers ahead of their copies.
_LAYERS_OF_GRADIENTS = 2
# Pinned copies of the weights, and slabs through which gradients leave (12 layers, embedding and head).
_HOST_BYTES = 3
# All logits are there in the weights' type, and their gradient is made in place: 2 bytes for each, of about 12 that the
# head of ``transformers`` takes.
_HEAD_PERCENT = 16


def mega_train(setup: Setup) -> Iterator[RivalDecisions]:
    """MegaTrain, with DeepSpeed's CPU Adam.

    Embedding, final norm and head stay on the device. A layer is fetched for every use: in forward, and in backward
    twice, because every block of layers is first run forward without a graph, and then every layer once more with one
    (``_forward_and_backward_single_gpu``). Gradients leave through pinned slabs, and a thread of the host adds them
    (``_grad_worker``). All waits until they are added. Then gradients are clipped, updated, weights copied to pinned
    memory and gradients cleared, in turn (``train.py::main``, ``_sync_params_to_gpu``). Weights in bf16 have no master
    copy, which changes numerics; moments are fp32. Not priced: copies from buffers to templates on the device.

    On several devices of a node, each has a process that reads whole layers from memory which all share, and adds whole
    gradients there under a lock (``_worker_grad_fn``). One process updates, with all cores.

    Args:
        setup: the request, for devices of one node.
    """
    precision, weight_bytes = setup.given.precision, setup.given.precision.weight_bytes
    if precision.weights == "bf16":
        precision = precision.model_copy(update={"master": "bf16"})
    layers: dict[str, list[int]] = defaultdict(list)
    for unit in setup.units:
        if unit.in_layer:
            layers[unit.segment].append(unit.num_weights)
    several = setup.given.data_parallel > 1
    largest = max((sum(sizes) for sizes in layers.values()), default=0)
    num_units = max(map(len, layers.values()), default=1)
    for block in _BLOCKS:
        resident = decide(
            setup,
            "megatrain",
            "recompute",
            lambda _: Place.CPU,
            precision=precision,
            zero_stage=3 if several else 0,
            fetches_whole="together" if several else None,
            gradient_path=GradientPath.BUFFERED,
            host_update=HostUpdate.DEEPSPEED,
            overlap_next_forward=False,
            num_param_slots=_SLOTS,
            num_gradient_slots=_LAYERS_OF_GRADIENTS * num_units,
            device_buffer_bytes=(_LAYERS_ON_DEVICE - _SLOTS) * weight_bytes * largest,
            recompute_block=block,
            # The first is copied, others added.
            sum_bytes=(2 if setup.given.num_micro_batches == 1 else 3) * weight_bytes,
            prepare_bytes=3 * weight_bytes if setup.given.clip else 0,  # the norm reads, scaling reads and writes
            publish_bytes=3 * weight_bytes,  # weights are read and written, gradients cleared
            host_bytes=_HOST_BYTES,
            head_percent=_HEAD_PERCENT,
        )
        units = {
            unit.name: resident.units[unit.name].model_copy(update={"params": "host"})
            for unit in setup.units
            if unit.in_layer and unit.num_weights
        }
        yield resident.model_copy(update={"units": {**resident.units, **units}})


def lay_blocks(block: int, program: Program) -> None:
    """Append forward and backward of every micro-batch; blocks of segments are first recomputed without a graph."""
    for micro_batch in range(program.decisions.num_micro_batches):
        for unit in program.units:
            program.lay(unit.forwards, Op.FORWARD, unit, micro_batch)
        for number, segment in reversed(list(enumerate(program.segments))):
            if AGAIN.get(segment[0].activations):
                _first_pass(program, number, block, micro_batch)
            lay_backward(program, segment, micro_batch)


def _first_pass(program: Program, number: int, block: int, micro_batch: int) -> None:
    """If a segment is the last of its block, compute the outputs of all segments of the block.

    Blocks are counted from the first segment that recomputes. The engine computes the last output too, and drops it.
    """
    again = [i for i, segment in enumerate(program.segments) if segment[0].activations in AGAIN]
    place = again.index(number)
    if number != again[-1] and (place + 1) % block:
        return
    for i in again[place - place % block : place + 1]:
        for unit in program.segments[i]:
            program.lay([], Op.RECOMPUTE, unit, micro_batch)
