"""The processes that ``torchrun`` starts for a plan of several ranks, and each one's share of its node."""

import dataclasses
import os
from typing import Literal, Self

from planner.costs.layout import Layout
from planner.plan.document import Plan, PlanError

Launcher = Literal["torchrun", "accelerate"]


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One rank of a plan.

    Attributes:
        rank: among all.
        data_rank: among those that each work on a part of every batch; ranks that share layers have one together.
        local_rank: among those of its node, and the number of its device.
        per_node: ranks that share a node's cores and memory.
    """

    rank: int
    data_rank: int
    local_rank: int
    per_node: int

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return this process's place, from the environment that ``torchrun`` sets.

        Raises:
            PlanError: another number of processes was started than the plan has ranks, or on other nodes.
        """
        ranks, per_node = plan.decisions.num_devices, ranks_per_node(plan)
        rank, started, local = (_environment(*of) for of in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)))
        if (stages := plan.decisions.pipeline_parallel) > 1:
            raise PlanError(
                f"the plan has {stages} pipeline stages, which can be simulated but not executed; plan with "
                "--pipeline-parallel 1"
            )
        if (started, local) != (ranks, min(per_node, ranks - rank // per_node * per_node)):
            raise PlanError(
                f"the plan is for {ranks} device(s), {per_node} on a node, but {started} process(es) were started, "
                f"{local} on this node; start it with `{launch_line(ranks, per_node)}`"
            )
        return cls(rank, rank // plan.decisions.tensor_parallel, _environment("LOCAL_RANK", 0), per_node)

    @property
    def is_first(self) -> bool:
        """Whether it is the one that prints and writes."""
        return self.rank == 0


def ranks_per_node(plan: Plan) -> int:
    """Return how many ranks of a plan share a full node's cores and memory."""
    decided = plan.decisions
    degrees = (decided.data_parallel, decided.tensor_parallel, decided.pipeline_parallel)
    return Layout(*degrees, plan.hardware.devices_per_node).ranks_per_node


def launch_line(ranks: int, per_node: int, *, plan: str = "PLAN", launcher: Launcher = "torchrun") -> str:
    """Return how a plan of so many ranks is started: on several nodes, once on each."""
    if ranks == 1:
        return f"ullage execute {plan}"
    nodes = -(-ranks // per_node)
    if launcher == "accelerate":
        several = " --machine_rank N --main_process_ip FIRST --main_process_port 29500" if nodes > 1 else ""
        # It starts processes with --multi_gpu alone, CPUs too; types and compiling are the plan's business.
        return (
            f"accelerate launch --multi_gpu --num_processes {ranks} --num_machines {nodes}{several} "
            f"--mixed_precision no --dynamo_backend no -m ullage execute {plan}"
        )
    several = f" --nnodes {nodes} --node-rank N --master-addr FIRST" if nodes > 1 else ""
    return f"torchrun --nproc-per-node {per_node}{several} -m ullage execute {plan}"


def _environment(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)
