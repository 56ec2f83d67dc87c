"""PyTorch's FSDP2 with ``CPUOffloadPolicy``."""

from collections.abc import Iterator

from planner.decisions import Place
from planner.placements import ACTIVATIONS
from planner.setup import Setup
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import AFTER_BACKWARD, decide


def fsdp2_offload(setup: Setup) -> Iterator[RivalDecisions]:
    """FSDP2 with ``CPUOffloadPolicy``: master copies in pinned host memory, fetched in fp32 for every use.

    A layer is cast on the device and then all-gathered, while the layer before it computes. The fused AdamW of PyTorch
    updates all parameters on the CPU when backward has ended (``torch/distributed/fsdp/_fully_shard``).
    """
    # One layer's shard waits in fp32 on the device until it is cast.
    fp32_bytes = 4 * max((-(-unit.num_params // setup.given.replicas(unit)) for unit in setup.units), default=0)
    for activations in ACTIVATIONS:
        yield decide(
            setup,
            "fsdp2-offload",
            activations,
            lambda _: Place.CPU,
            params="host",
            zero_stage=3 if setup.given.data_parallel > 1 else 0,
            gradient_path=GradientPath.FSDP2,
            device_buffer_bytes=fp32_bytes,
            **AFTER_BACKWARD,
        )
