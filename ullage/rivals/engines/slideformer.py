"""SlideFormer: a window of layers slides through each device, and the host updates a layer as its gradient arrives.

Source: github.com/RegiaYoung/SlideFormer, ``offload_transformer.py`` and ``transformer_layer.py``; of several devices
``multi_gpu/shared_data_parallel.py``. That is its authors' reference; their own engine for several devices, SlideDP
(arXiv 2609.34162), is not public.
"""

from collections.abc import Iterator

from planner.decisions import Place
from planner.setup import Setup
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import AFTER_BACKWARD, decide

# ``gpu_unit_size``: the layer that computes, and the next one. Each has room for its gradients, too.
_LAYERS_ON_DEVICE = 2
# A master copy in fp32 is read and a weight in bf16 written to a pinned buffer, before each copy to the device.
_CAST_BYTES = 6
# On several devices: a rank copies its gradient to a shared buffer, and one of them adds it to a mean in fp32.
_COPY_BYTES, _ADD_BYTES = 4, 10
# That rank makes the mean, and divides it: bytes for each parameter, whatever the number of ranks.
_MEAN_BYTES = 12
# ``LegacyFusedLinearCrossEntropyLoss`` makes logits in chunks.
_HEAD_PERCENT = 5


def slide_former(setup: Setup) -> Iterator[RivalDecisions]:
    """SlideFormer, which does not clip: a layer's update begins when its gradient is on the host.

    All layers, embedding and head among them, are on the host alone: master copy and moments in fp32. For each use a
    thread casts a layer and copies it (``to_device_async``). In backward, inputs of layers come back from the host, and
    their forward is run again. One buffer on the host takes gradients in turn, so that one waits for the update of the
    one before. The next iteration waits for all updates (``wait_for_completion``).

    On several devices of a node, ranks read the same master copies. They put gradients into a buffer that they share,
    and the first one adds them up and updates (``reduce_chunk``).

    Args:
        setup: the request, with one micro-batch and without clipping, for devices of one node.
    """
    ranks, weight_bytes = setup.given.data_parallel, setup.given.precision.weight_bytes
    largest = max((unit.num_params for unit in setup.units), default=0)
    yield decide(
        setup,
        "slideformer",
        "recompute",
        lambda _: Place.CPU,
        params="host",
        inputs_on_host=True,
        zero_stage=3 if ranks > 1 else 0,
        fetches_whole="together" if ranks > 1 else None,
        gradient_path=GradientPath.BUFFERED,
        update_start="step" if setup.given.clip else "backward",
        update_order="forward" if setup.given.clip else "backward",
        num_param_slots=_LAYERS_ON_DEVICE,
        num_gradient_slots=_LAYERS_ON_DEVICE,
        device_buffer_bytes=weight_bytes * largest,
        cast_bytes=_CAST_BYTES,
        awaits_updates=not setup.given.clip,
        sum_bytes=_COPY_BYTES + _ADD_BYTES + -(-_MEAN_BYTES // ranks) if ranks > 1 else 0,
        head_percent=_HEAD_PERCENT,
        **AFTER_BACKWARD,
    )
