"""Conditions on data that is on the host or on NVMe for a part of the iteration.

At the last unit's backward all saved activations of the segments before it are somewhere. Those that are kept are on
the device. Offloaded ones are still on the device, on the host, or, if evicted, on NVMe. A copy in progress occupies
two places, which only takes more memory.

State on NVMe passes through host buffers. A buffer holds a subgroup from its read to its write. So
when updates may begin, at most the buffers' bytes of state have been read, and when all updates have ended, at most the
buffers' bytes are still to be written.
"""

from collections.abc import Iterable, Sequence

from planner.bounds.program import LinearProgram, Sum
from planner.graph import Unit
from planner.schedule.tasks import Tier

STATE_BUFFERS = "state in host buffers"


def offloaded(
    program: LinearProgram, passages: Iterable[tuple[Sequence[Unit], int]], unit_bytes: float, where: str = ""
) -> dict[Tier, str]:
    """Add variables for the offloaded activations on each tier, in multiples of ``unit_bytes``; return them by tier.

    Args:
        program: the program to extend.
        passages: segments, each with the number of times that its activations are there.
        unit_bytes: the unit of the variables.
        where: ends the names of variables and rows.
    """
    everything, evicted = Sum(), Sum()
    for segment, count in passages:
        moved = count * sum(unit.swap_bytes for unit in segment) / unit_bytes
        for way, sums in (("offload", (everything,)), ("evict", (everything, evicted))):
            if (name := f"{segment[0].segment}:{way}") in program.boxes:
                for terms in sums:
                    terms[name] += moved
    if not everything:
        return {}
    tiers = (Tier.GPU, Tier.HOST, *((Tier.NVME,) if evicted else ()))
    high = program.highest(everything)
    found = {tier: program.variable(f"offloaded activations on {tier}{where}", 0.0, high) for tier in tiers}
    program.at_least(
        f"offloaded activations are somewhere{where}", Sum(*((name, 1.0) for name in found.values())), everything
    )
    if evicted:
        program.at_least(f"evicted activations alone are on NVMe{where}", evicted, Sum((found[Tier.NVME], 1.0)))
    return found
