"""The processes that ``torchrun`` starts for a plan of several ranks."""

import dataclasses
import os
from typing import Self

from planner.costs.layout import Layout
from planner.plan.document import Plan, PlanError


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One rank of a plan.

    Attributes:
        rank: global rank.
        data_rank: data-parallel rank. Ranks that share layers have the same number.
        reader: number of the group of data-parallel ranks that share sequences, and so read the same ones.
        local_rank: rank on its node, and number of its device.
        per_node: ranks per node, which share its cores and memory.
        stage: pipeline stage. Ranks of all stages with one data-parallel rank read the same sequences.
    """

    rank: int
    data_rank: int
    reader: int
    local_rank: int
    per_node: int
    stage: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return this process's ranks from the environment variables of ``torchrun``.

        Raises:
            PlanError: the number of processes, in total or per node, does not match the plan.
        """
        ranks, per_node = plan.decisions.num_devices, ranks_per_node(plan)
        rank, started, local = (_environment(*of) for of in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)))
        if (started, local) != (ranks, min(per_node, ranks - rank // per_node * per_node)):
            raise PlanError(
                f"the plan is for {ranks} device(s), {per_node} on a node, but {started} process(es) were started, "
                f"{local} on this node; start it with `{launch_line(ranks, per_node)}`"
            )
        stage, rank_of_stage = divmod(rank, ranks // plan.decisions.pipeline_parallel)
        data_rank = rank_of_stage // plan.decisions.tensor_parallel
        reader = data_rank // plan.decisions.context_parallel
        return cls(rank, data_rank, reader, _environment("LOCAL_RANK", 0), per_node, stage)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0


def ranks_per_node(plan: Plan) -> int:
    """Return the number of a plan's ranks on a full node."""
    decided = plan.decisions
    degrees = (decided.data_parallel, decided.tensor_parallel, decided.pipeline_parallel)
    return Layout(*degrees, plan.hardware.devices_per_node).ranks_per_node


def launch_line(ranks: int, per_node: int, *, plan: str = "PLAN") -> str:
    """Return the command line that starts a plan of ``ranks`` ranks. On several nodes, it runs once on each node."""
    if ranks == 1:
        return f"ullage execute {plan}"
    nodes = -(-ranks // per_node)
    several = f" --nnodes {nodes} --node-rank N --master-addr FIRST" if nodes > 1 else ""
    return f"torchrun --nproc-per-node {per_node}{several} -m ullage execute {plan}"


def is_first_process() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return _environment("RANK", 0) == 0


def _environment(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)
