"""The engine policies by name, and what each of them needs."""

from collections.abc import Callable, Iterator
from typing import Final

from planner.models.choice import DEGREES
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.setup import Setup
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed import super_offload, twin_flow, zero_infinity, zero_offload, zero_offload_blocking
from ullage.rivals.engines.fsdp2 import fsdp2_offload
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.engines.megatrain import mega_train
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.engines.roundpipe import round_pipe, round_pipe_sync
from ullage.rivals.engines.streaming import streamed
from ullage.rivals.engines.zenflow import zen_flow

Policy = Callable[[Setup], Iterator[RivalDecisions]]

POLICIES: Final[dict[str, Policy]] = {
    "gpu-only": gpu_only,
    "zero-offload-blocking": zero_offload_blocking,
    "zero-offload": zero_offload,
    "twin-flow": twin_flow,
    "interleaved": interleaved,
    "fsdp2-offload": fsdp2_offload,
    "super-offload": super_offload,
    "zenflow": zen_flow,
    "megatrain": mega_train,
    "roundpipe": round_pipe,
    "roundpipe-sync": round_pipe_sync,
    "streaming": streamed,
}
# Policies that need NVMe. They are tried if the request allows it.
STORAGE_POLICIES: Final[dict[str, Policy]] = {"zero-infinity": zero_infinity, "ratel": ratel}
# Policies whose first placement that fits is the fastest, with activations kept and with all recomputed: the fewer
# updates the CPU does, the faster.
FIRST_IS_FASTEST = frozenset({"twin-flow", "super-offload"})
# Policies that can also keep their parameters on the host. This is tried if nothing fits otherwise.
HOST_PARAMETER_POLICIES = ("zero-offload-blocking", "zero-offload", "super-offload", "zero-infinity")
# Policies that can also keep them on NVMe, which is tried last.
NVME_PARAMETER_POLICIES = ("zero-infinity",)
# Policies whose placements are not in pairs, with activations kept and recomputed.
UNPAIRED = frozenset({"megatrain", "roundpipe", "roundpipe-sync", "streaming"})

# Policies of engines that have an optimizer for whole matrices; of the others we know none that is released for it.
FOR_WHOLE_MATRICES = frozenset({"gpu-only"})

_ONE_DEVICE = frozenset({"megatrain", "streaming"})
_ONE_NODE = frozenset({"roundpipe", "roundpipe-sync"})
_ONLY_ADAM = frozenset({"zenflow", "megatrain", "streaming"})


def policies_of(optimizer: Optimizer) -> list[str]:
    """Return the names of the policies in :data:`POLICIES` that can be compared with an optimizer."""
    return [name for name in POLICIES if OPTIMIZERS[optimizer].others is None or name in FOR_WHOLE_MATRICES]


def can_run(name: str, setup: Setup, num_nodes: int) -> bool:
    """Return whether an engine, as we know it, can do what a setup requires at all.

    MegaTrain and layer streaming are known for one device, RoundPipe for the devices of one node without other
    parallelism. Some have no optimizer but Adam.
    """
    if name in _ONLY_ADAM and setup.given.optimizer != "adamw":
        return False
    alone = all(getattr(setup.given, degree) == 1 for degree in DEGREES if degree != "data_parallel")
    if name in _ONE_DEVICE:
        return alone and setup.given.data_parallel == 1
    return name not in _ONE_NODE or (alone and num_nodes == 1)
