"""The processes that ``torchrun`` starts for a plan of several ranks."""

import os
from typing import Literal

from planner.costs.layout import Layout
from planner.plan.document import Plan, PlanError

Launcher = Literal["torchrun", "accelerate"]


def check_processes(plan: Plan) -> None:
    """Check that ``torchrun`` has started the processes of a plan, by its environment variables.

    Raises:
        PlanError: the number of processes, in total or per node, does not match the plan.
    """
    ranks = plan.decisions.num_devices
    started, local = _environment("WORLD_SIZE", 1), _environment("LOCAL_WORLD_SIZE", 1)
    own = next((node for node in nodes(plan) if rank() in node), range(0))
    if (started, local) != (ranks, len(own)):
        raise PlanError(
            f"the plan is for {ranks} device(s), {len(own)} on this node, but {started} process(es) were started, "
            f"{local} on this node; start it with `{'`, `'.join(launch_lines(plan))}`"
        )


def ranks_per_node(plan: Plan) -> int:
    """Return the number of a plan's ranks on a full node."""
    return Layout.of(plan.decisions, plan.hardware).ranks_per_node


def nodes(plan: Plan) -> list[range]:
    """Return the ranks of each node. Kinds of devices are in nodes of their own, unless one node takes all ranks."""
    kinds, ranks = plan.kinds(), plan.decisions.num_devices
    if len(kinds) == 1 or all(kind.hardware.devices_per_node >= ranks for kind in kinds):
        return Layout.of(plan.decisions, plan.hardware).nodes()
    found = []
    for kind in kinds:
        size, end = kind.hardware.devices_per_node, kind.ranks.stop
        found += [range(first, min(first + size, end)) for first in range(kind.first_rank, end, size)]
    return found


def launch_lines(plan: Plan, *, path: str = "PLAN", launcher: Launcher = "torchrun") -> list[str]:
    """Return the command lines that start a plan: one for all nodes, or one for each node if their devices are unlike.

    Raises:
        PlanError: ``accelerate`` cannot start unlike numbers of processes.
    """
    found, ranks = nodes(plan), plan.decisions.num_devices
    if ranks == 1:
        return [f"ullage execute {path}"]
    sizes = [len(node) for node in found]
    if launcher == "accelerate":
        if plan.others and len(set(sizes)) > 1:
            raise PlanError(
                f"nodes of this plan start {' and '.join(map(str, sizes))} processes, but accelerate starts equally "
                "many on each; start them with torchrun"
            )
        several = " --machine_rank N --main_process_ip FIRST --main_process_port 29500" if len(found) > 1 else ""
        # Only --multi_gpu makes it start several processes, also for CPUs. The plan decides types and compilation.
        return [
            (
                f"accelerate launch --multi_gpu --num_processes {ranks} --num_machines {len(found)}{several} "
                f"--mixed_precision no --dynamo_backend no -m ullage execute {path}"
            )
        ]
    return [
        f"torchrun --nproc-per-node {size}"
        + (f" --nnodes {len(found)} --node-rank {number} --master-addr FIRST" if len(found) > 1 else "")
        + f" -m ullage execute {path}"
        for number, size in (enumerate(sizes) if plan.others and len(found) > 1 else [("N", sizes[0])])
    ]


def rank() -> int:
    """Return this process's global rank; 0 if it is the only one."""
    return _environment("RANK", 0)


def local_rank() -> int:
    """Return this process's rank on its node, and the number of its device."""
    return _environment("LOCAL_RANK", 0)


def is_first_process() -> bool:
    """Return whether this process is rank 0, which prints and writes, or the only one."""
    return rank() == 0


def _environment(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)
