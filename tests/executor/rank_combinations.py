"""Ranks that share layers, tokens, experts and batches, in stages or not, and how each combination is compared.

Losses, norms, and weights after three clipped steps of plain SGD are compared with those of the whole model in the
memory of one process: what has become of weights are their gradients. What processes send each other is compared with
the bytes of their plan.
"""

from typing import Any, Final, NamedTuple

import torch
from pipeline_programs import trained_in_memory, trained_in_stages
from plans import mixed
from rank_pool import Processes
from training import Task, decide, uniform, units_of

from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions
from planner.lowering import lower
from planner.lowering.stages import stage_of
from planner.models.kernels import Collective
from planner.schedule.tasks import Lane, Op

HOST, NVME = uniform("host", "cpu"), uniform("nvme", "nvme")
KEPT, AGAIN, OFF = uniform("gpu", "gpu"), uniform("gpu", "stream", "recompute"), uniform("host", "cpu", "recompute")
ZERO_BUBBLE = {"pipeline_order": "zero-bubble"}
SHARED = {"data_parallel": 2, "context_parallel": 2}
RING = SHARED | {"context_exchange": "ring"}
LEAVING, ON_DRIVES = uniform("host", "cpu", "offload"), uniform("gpu", "cpu", "offload-nvme")


def _degrees(tensor: int, data: int, expert: int, context: int) -> dict[str, int]:
    ranks = {"tensor_parallel": tensor, "data_parallel": data, "expert_parallel": expert, "context_parallel": context}
    return ranks | {"zero_stage": 3}


# the model, micro-batches, stages, and ranks of each
STAGED = {
    "kept": ("llama", 4, 2, {}, KEPT),
    "uneven, tied, recomputed": ("llama-tied", 4, 3, {}, AGAIN),
    "fewer micro-batches than stages": ("qwen3", 2, 3, {}, HOST),
    "on a drive": ("qwen3", 3, 2, {}, NVME),
    "experts": ("mixtral", 4, 3, {}, OFF),
    "learned positions": ("gpt2-still-shared", 4, 2, {}, HOST),
    "projections around": ("opt-still-shared", 3, 2, {}, AGAIN),
    "replicas": ("llama-tied", 3, 2, {"data_parallel": 2}, KEPT),
    "sharded state": ("qwen3", 3, 2, {"data_parallel": 2, "zero_stage": 1}, uniform("gpu", "cpu")),
    "sharded gradients": ("llama-tied", 3, 2, {"data_parallel": 2, "zero_stage": 2}, AGAIN),
    "sharded weights": ("llama", 3, 2, {"data_parallel": 2, "zero_stage": 3}, OFF),
    "tensors": ("llama-shared", 3, 2, {"tensor_parallel": 2}, KEPT),
    "tensors, tied": ("llama-tied-shared", 3, 2, {"tensor_parallel": 2}, OFF),
    "rounds": ("llama-deep", 4, 2, {"pipeline_rounds": 2}, OFF),
    "rounds, kept": ("gpt2-deep-still-shared", 3, 2, {"pipeline_rounds": 3}, KEPT),
    "rounds, sharded": (
        "llama-tied-deep-shared",
        2,
        2,
        {"pipeline_rounds": 2, "data_parallel": 2, "zero_stage": 3},
        OFF,
    ),
    "rounds, tensors": ("llama-tied-deep-shared", 3, 2, {"pipeline_rounds": 2, "tensor_parallel": 2}, NVME),
    "loss in tiles": ("llama-tied", 3, 2, {"loss_tile_tokens": 8}, AGAIN),
    "loss in tiles, tensors": ("llama-tied-shared", 3, 2, {"loss_tile_tokens": 8, "tensor_parallel": 2}, OFF),
    "layers in tiles": ("llama", 3, 2, {"loss_tile_tokens": 8, "layer_tile_tokens": 8}, HOST),
    "activations on the host": ("llama-tied", 5, 3, {}, LEAVING),
    "activations on the host, in rounds": ("llama-deep", 4, 2, {"pipeline_rounds": 2}, LEAVING),
    "activations on drives": ("gpt2-still-shared", 4, 2, {}, ON_DRIVES),
    "activations on drives, in rounds, sharded": (
        "llama-tied-deep-shared",
        3,
        2,
        {"pipeline_rounds": 2, "data_parallel": 2, "zero_stage": 3},
        ON_DRIVES,
    ),
    "activations on the host, tensors": (
        "llama-tied-deep-shared",
        3,
        2,
        {"pipeline_rounds": 2, "tensor_parallel": 2},
        LEAVING,
    ),
    "sequences": ("llama-tied-shared", 3, 2, {"data_parallel": 2, "context_parallel": 2}, OFF),
    "sequences, in rounds": (
        "llama-tied-deep-shared",
        3,
        2,
        {"pipeline_rounds": 2, "data_parallel": 2, "context_parallel": 2, "zero_stage": 3},
        AGAIN,
    ),
    "sequences, loss in tiles": (
        "qwen3-shared",
        2,
        2,
        {"data_parallel": 2, "context_parallel": 2, "zero_stage": 2, "loss_tile_tokens": 5},
        uniform("gpu", "cpu"),
    ),
    "sequences, learned positions": ("gpt2-still-shared", 3, 2, {"data_parallel": 2, "context_parallel": 2}, LEAVING),
    "a ring": ("llama-tied-shared", 3, 2, RING, AGAIN),
    "a ring, learned positions, in rounds": ("gpt2-deep-still-shared", 3, 2, RING | {"pipeline_rounds": 2}, OFF),
    "a ring, zero bubble": ("qwen3-shared", 3, 2, RING | ZERO_BUBBLE | {"zero_stage": 3}, LEAVING),
    "zero bubble": ("llama", 5, 3, ZERO_BUBBLE, KEPT),
    "zero bubble, tied, recomputed": ("llama-tied", 4, 3, ZERO_BUBBLE, AGAIN),
    "zero bubble, on a drive": ("qwen3", 3, 2, ZERO_BUBBLE, NVME),
    "zero bubble, biases": ("gpt2-still-shared", 4, 2, ZERO_BUBBLE, HOST),
    "zero bubble, experts": ("mixtral", 4, 3, ZERO_BUBBLE, OFF),
    "zero bubble, activations on the host": ("llama-tied", 5, 3, ZERO_BUBBLE, LEAVING),
    "zero bubble, sharded weights": ("llama", 3, 2, {"data_parallel": 2, "zero_stage": 3} | ZERO_BUBBLE, OFF),
    "zero bubble, replicas": ("llama-tied", 3, 2, {"data_parallel": 2} | ZERO_BUBBLE, KEPT),
    "zero bubble, tensors": ("llama-tied-shared", 3, 2, {"tensor_parallel": 2} | ZERO_BUBBLE, AGAIN),
    "zero bubble, tensors, biases": ("gpt2-still-shared", 3, 2, {"tensor_parallel": 2} | ZERO_BUBBLE, LEAVING),
    "zero bubble, sequences": (
        "llama-tied-shared",
        3,
        2,
        {"data_parallel": 2, "context_parallel": 2, "zero_stage": 2} | ZERO_BUBBLE,
        AGAIN,
    ),
    "zero bubble, fewer micro-batches than stages": ("qwen3", 2, 3, ZERO_BUBBLE, LEAVING),
    "zero bubble, in rounds": ("gpt2-deep-still-shared", 4, 2, ZERO_BUBBLE | {"pipeline_rounds": 3}, OFF),
    "zero bubble, in rounds, tied, sharded": (
        "llama-tied-deep-shared",
        2,
        2,
        {"pipeline_rounds": 2, "data_parallel": 2, "zero_stage": 3} | ZERO_BUBBLE,
        OFF,
    ),
    "experts of ranks": ("mixtral-shared", 3, 2, {"data_parallel": 2, "expert_parallel": 2}, HOST),
}
"""In stages, of 2 to 4 processes."""
EIGHT = {
    "data and tensors": ("qwen3-shared", 3, 2, {"data_parallel": 2, "tensor_parallel": 2, "zero_stage": 3}, OFF),
    "sequences and tensors": (
        "llama-tied-shared",
        3,
        2,
        {"data_parallel": 2, "context_parallel": 2, "tensor_parallel": 2},
        HOST,
    ),
    "sequences and data": ("qwen3-shared", 3, 2, {"data_parallel": 4, "context_parallel": 2, "zero_stage": 3}, OFF),
    "sequences and experts": (
        "mixtral-shared",
        3,
        2,
        {"data_parallel": 4, "context_parallel": 2, "expert_parallel": 2, "zero_stage": 1},
        uniform("gpu", "cpu"),
    ),
    "sequences, four stages": ("llama-tied-deep-shared", 4, 4, {"data_parallel": 2, "context_parallel": 2}, NVME),
    "experts and tensors": (
        "mixtral-shared",
        3,
        2,
        {"data_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2, "zero_stage": 3},
        HOST,
    ),
    "three stages in rounds": (
        "llama-wide",
        3,
        3,
        {"pipeline_rounds": 2, "data_parallel": 2, "zero_stage": 3},
        OFF,
    ),
    "three stages": ("llama-tied-shared", 4, 3, {"data_parallel": 2, "zero_stage": 2}, AGAIN),
}
"""In stages, of 8 processes, or 6."""
ALONE = {
    "all degrees": ("mixtral-shared", 2, 1, _degrees(2, 4, 2, 2), mixed),
    "experts beside": ("qwen3-moe-shared", 2, 1, _degrees(1, 8, 4, 2), mixed),
    "experts of those who share": ("mixtral-shared", 2, 1, _degrees(1, 8, 2, 4), uniform("host", "cpu", "recompute")),
    "replicas": ("llama-shared", 2, 1, _degrees(1, 8, 1, 4), uniform("host", "stream", "offload")),
    "tensors": ("qwen3-shared", 2, 1, _degrees(2, 4, 1, 2), uniform("nvme", "nvme", "offload-nvme")),
    "joint projections": ("gpt2-still-shared", 2, 1, _degrees(2, 4, 1, 2), mixed),
    "learned positions": ("opt-still-shared", 2, 1, _degrees(1, 8, 1, 2), mixed),
    "only tensors": ("qwen3-shared", 2, 1, _degrees(4, 2, 1, 1), mixed),
}
"""Without stages, of 8 processes."""


BOUNDS: Final = {"fp32": 2e-6, "bf16": 2**-6}
"""By type of weights, the most that these may be off, as sums are in another order. Losses may be 5 times as much."""


class Compared(NamedTuple):
    """How far a combination is from one process, and what it sends.

    Attributes:
        decisions: what is run.
        off_losses: most that a loss or norm of any process differs, relative to it.
        off_weights: most that a weight differs, in the Euclidean norm, relative to one more than the weight's.
        sent, planned: bytes that all processes together send to other stages, exchange with replicas, and exchange
            inside layers, in all steps.
    """

    decisions: Decisions
    off_losses: float
    off_weights: float
    sent: tuple[int, ...]
    planned: tuple[int, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing is further off than :data:`BOUNDS`, and all bytes are those of the plan."""
        most = BOUNDS[self.decisions.precision.weights]
        return self.off_losses <= 5 * most and self.off_weights <= most and self.sent == self.planned


def compared(
    pool: Processes,
    family: str,
    num_micro_batches: int,
    stages: int,
    degrees: dict[str, Any],
    choose: Any,
    dtype: torch.dtype = torch.float32,
    penalty: float = 0.0,
) -> Compared:
    """Train a combination in its processes, and in memory; compare. With a ``penalty``, one stage leaves the plan."""
    task = Task(family, dtype, num_micro_batches, max_norm=0.5, iterations=3, schedule=False, optimizer="sgd-plain")
    decisions = decide(task, choose, pipeline_parallel=stages, **degrees)
    results = pool.call(decisions.num_devices, trained_in_stages, task, decisions, penalty, timeout_s=100.0)
    losses, final = trained_in_memory(task, decisions.num_readers, penalty)
    off_losses, off_weights = list[float](), list[float]()
    for rank, (seen, weights, _) in enumerate(results):
        reader = rank % (decisions.num_devices // stages) // decisions.tensor_parallel // decisions.context_parallel
        off_losses += (abs(own - its) / abs(its) for own, its in zip(seen, losses[reader], strict=True))
        assert weights.keys() == final.keys()
        both = ((weights[name].float(), its.float()) for name, its in final.items())
        off_weights += (float((own - its).norm() / (1 + its.norm())) for own, its in both)
    sent = tuple(sum(of_kind) for of_kind in zip(*(found for *_, found in results), strict=True))
    return Compared(decisions, _most(off_losses), _most(off_weights), sent, _planned_bytes(task, decisions))


def _most(off: list[float]) -> float:
    """Return the largest; NaN if one is, which no bound allows."""
    return float(torch.tensor(off, dtype=torch.float64).max())


def _planned_bytes(task: Task, decisions: Decisions) -> tuple[int, ...]:
    """Return what is planned that all processes send each other; see :class:`Compared`."""
    tasks = lower(units_of(task, decisions), decisions, asynchronous=False).tasks
    collectives = [each for each in tasks if each.op in {Op.GATHER, Op.SCATTER}]
    sends = [each for each in tasks if each.op is Op.SEND and each.lane is not Lane.COLLECTIVE]
    planned = [sum(each.num_bytes for each in kind) for kind in (sends, collectives)]
    planned.append(sum(_bytes_inside(task, decisions, stage) for stage in range(decisions.pipeline_parallel)))
    repeats = task.iterations * decisions.num_devices // decisions.pipeline_parallel
    return tuple(num_bytes * repeats for num_bytes in planned)


def _bytes_inside(task: Task, decisions: Decisions, stage: int) -> int:
    """Return what ranks that share layers, tokens of sequences or experts exchange inside the layers of a stage.

    Experts get as many tokens as are routed to them, but all ranks together send as many as are planned.
    """
    own, decided, _ = stage_of(units_of(task, decisions), decisions, stage)
    cost, total = CostModel(load_profile("rtx-4090x8"), own, decided), 0
    for each in lower(own, decided, asynchronous=False).tasks:
        for kernel in cost.kernels_of(each) if each.lane is Lane.COMPUTE else ():
            if isinstance(kernel, Collective):
                total += kernel.num_bytes * kernel.count * (kernel.num_passes if kernel.kind == "ring" else 1)
    return total
