"""The engine policies by name, and what each of them needs."""

from collections.abc import Callable, Iterator
from typing import Final

from planner.models.choice import DEGREES
from planner.models.config import ModelConfig
from planner.models.operators import Batch, Operator
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.setup import Setup
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed import super_offload, twin_flow, zero_infinity, zero_offload, zero_offload_blocking
from ullage.rivals.engines.fsdp2 import fsdp2_offload
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.engines.llmq import graphs as graphs_of_llmq
from ullage.rivals.engines.llmq import llm_q
from ullage.rivals.engines.megatrain import mega_train
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.engines.roundpipe import round_pipe, round_pipe_sync
from ullage.rivals.engines.slideformer import slide_former
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
    "slideformer": slide_former,
    "llmq": llm_q,
}
Graphs = Callable[[ModelConfig, Batch], Iterator[tuple[Operator, ...]]]
# Engines with kernels of their own: their operators for a model and a batch, of each way to keep activations.
GRAPHS: Final[dict[str, Graphs]] = {"llmq": graphs_of_llmq}
# Policies that need NVMe. They are tried if the request allows it.
STORAGE_POLICIES: Final[dict[str, Policy]] = {"zero-infinity": zero_infinity, "ratel": ratel}
# Policies whose first placement that fits is the fastest, with activations kept and with all recomputed: the fewer
# updates the CPU does, and the less moves, the faster.
FIRST_IS_FASTEST = frozenset({"twin-flow", "super-offload", "llmq"})
# Policies that can also keep their parameters on the host. This is tried if nothing fits otherwise.
HOST_PARAMETER_POLICIES = ("zero-offload-blocking", "zero-offload", "super-offload", "zero-infinity")
# Policies that can also keep them on NVMe, which is tried last.
NVME_PARAMETER_POLICIES = ("zero-infinity",)
# Policies whose placements are not in pairs, with activations kept and recomputed.
UNPAIRED = frozenset({"megatrain", "roundpipe", "roundpipe-sync", "streaming", "slideformer"})

# Policies of engines that have an optimizer for whole matrices; of the others we know none that is released for it.
FOR_WHOLE_MATRICES = frozenset({"gpu-only"})

# Engines that share a model by data parallelism alone; and of these, those whose devices share host memory.
_ALONE = frozenset({"megatrain", "roundpipe", "roundpipe-sync", "streaming", "slideformer", "llmq"})
_ONE_NODE = _ALONE - {"streaming"}
_ONLY_ADAM = frozenset({"zenflow", "megatrain", "streaming", "slideformer", "llmq"})
_ADAMS = frozenset({"adamw", "adamw-bf16"})


def policies_of(optimizer: Optimizer) -> list[str]:
    """Return the names of the policies in :data:`POLICIES` that can be compared with an optimizer."""
    return [name for name in POLICIES if OPTIMIZERS[optimizer].others is None or name in FOR_WHOLE_MATRICES]


def can_run(name: str, setup: Setup, num_nodes: int) -> bool:
    """Return whether an engine, as we know it, can do what a setup requires at all.

    Engines that stream layers know data parallelism alone, and all but ShadowSpill one node. Some have no optimizer but
    Adam. SlideFormer neither clips nor accumulates.
    """
    optimizer, known = setup.given.optimizer, _ADAMS if name == "llmq" else {"adamw"}
    if name in _ONLY_ADAM and optimizer not in known:
        return False
    if name == "slideformer" and (setup.given.clip or setup.given.num_micro_batches > 1):
        return False
    alone = all(getattr(setup.given, degree) == 1 for degree in DEGREES if degree != "data_parallel")
    return (name not in _ALONE or alone) and (name not in _ONE_NODE or num_nodes == 1)
