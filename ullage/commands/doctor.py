"""``ullage doctor``: show cores, memory and GPUs of this machine, and the first problem."""

import argparse
from typing import Any

from ullage.analysis.doctor import examine
from ullage.output.formatting import si
from ullage.report.terminal import answer

DESCRIPTION = """\
Show versions, cores, memory and GPUs of this machine. If something is wrong, show the first problem and its
remedy; the exit code is then 1. A machine without a GPU is not a problem: its cores stand in for a GPU."""
EXAMPLES = """
    ullage doctor
    ullage doctor --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Examine the machine."""
    found = examine()
    answer(args, found, _rows(found))
    return 1 if found["failure"] else 0


def _rows(found: dict[str, Any]) -> dict[str, str]:
    def size(count: int | None) -> str:
        return "unknown" if count is None else si(count, "B")

    cuda = f"CUDA {found['cuda']}" if found["cuda"] else "without CUDA"
    lockable = "unlimited" if found["lockable_bytes"] is None else size(found["lockable_bytes"])
    free, total = size(found["available_memory_bytes"]), size(found["memory_bytes"])
    pages = (
        f"transparent {found['transparent_hugepages'] or 'unknown'}, {found['num_free_hugepages']} reserved and free"
    )
    rows = {
        "versions": f"ullage {found['ullage']}, Python {found['python']}, torch {found['torch']} ({cuda})",
        "CPU": f"{found['cpu']}, {found['num_cores']} cores, NUMA nodes: {found['num_numa_nodes'] or 'unknown'}",
        "host memory": f"{free} free of {total}; lockable (pinned): {lockable}",
        "huge pages": pages,
    }
    for number, gpu in enumerate(found["gpus"]):
        link = f"PCIe {gpu['pcie_generation']} (at most {gpu['pcie_generation_max']})"
        lanes = f"x{gpu['pcie_width']} (at most x{gpu['pcie_width_max']})"
        memory = f"{size(gpu['free_bytes'])} free of {size(gpu['memory_bytes'])}"
        rows[f"GPU {number}"] = f"{gpu['name']}, driver {gpu['driver']}, {memory}, {link} {lanes}"
    if not found["gpus"]:
        rows["GPU"] = "none (nvidia-smi is missing, or lists none)"
    failure = found["failure"]
    return rows | {"first problem": f"{failure['what']}; {failure['remedy']}" if failure else "none"}
