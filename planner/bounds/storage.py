"""Conditions on what is kept on the host and on NVMe for a part of the iteration.

[Note: Offloaded memory] At the last unit's backward all activations of the segments before it are somewhere: what is
kept on the device is there; what is offloaded may not have left it yet, is on the host, or, if it is evicted, on NVMe.
What is on its way is in two places, which only takes more memory.

[Note: State ahead] State on NVMe passes through host buffers, which hold a subgroup from its read to its write. So when
updates may begin at last, no more state has been read for them than buffers hold, and when they have been made no more
is still to be written.
"""

from collections.abc import Sequence

from planner.bounds.program import LinearProgram, Sum
from planner.graph import Unit
from planner.schedule.tasks import Tier

STATE_BUFFERS = "state in host buffers"


def offloaded(program: LinearProgram, segments: Sequence[Sequence[Unit]], unit_bytes: float) -> dict[Tier, str]:
    """Add what the tiers hold of offloaded activations, in multiples of ``unit_bytes``; return variables by tier."""
    everything, evicted = Sum(), Sum()
    for segment in segments[:-1]:
        moved = sum(unit.swap_bytes for unit in segment) / unit_bytes
        for way, sums in (("offload", (everything,)), ("evict", (everything, evicted))):
            if (name := f"{segment[0].segment}:{way}") in program.boxes:
                for terms in sums:
                    terms[name] += moved
    if not everything:
        return {}
    tiers = (Tier.GPU, Tier.HOST, *((Tier.NVME,) if evicted else ()))
    high = program.highest(everything)
    found = {tier: program.variable(f"offloaded activations on {tier}", 0.0, high) for tier in tiers}
    program.at_least("offloaded activations are somewhere", Sum(*((name, 1.0) for name in found.values())), everything)
    if evicted:
        program.at_least("evicted activations alone are on NVMe", evicted, Sum((found[Tier.NVME], 1.0)))
    return found
