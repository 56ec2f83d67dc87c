"""Deep Optimizer States: every few subgroups, one is streamed to the device and updated there."""

import functools
from collections.abc import Iterator, Sequence

from planner.decisions import Place
from planner.optimizers import OPTIMIZERS
from planner.placements import ACTIVATIONS
from planner.setup import Setup, pieces
from ullage.rivals.decisions import GradientPath, HostUpdate, RivalDecisions
from ullage.rivals.engines.deciding import decide, num_subgroups
from ullage.rivals.engines.deepspeed import deepspeed_options

# The strides to try if the user leaves them to us.
INTERLEAVED_STRIDES = (2, 3, 4, 5, 6, 8, 10)


def interleaved(
    setup: Setup, strides: Sequence[int] = INTERLEAVED_STRIDES, cpu_fraction: float = 1.0
) -> Iterator[RivalDecisions]:
    """Deep Optimizer States: every k-th subgroup is streamed to the device and updated there, one in flight.

    It is built on DeepSpeed ZeRO-3. ``cpu_fraction`` < 1 keeps the first subgroups on the device, as Twin-Flow does.
    """
    total = num_subgroups(setup)
    first = total - round(total * cpu_fraction)

    def place(stride: int, i: int) -> Place:
        return Place.GPU if i < first else Place.STREAM if i % stride == stride - 1 else Place.CPU

    engine = deepspeed_options(setup, GradientPath.ZERO3_ASYNC)
    # Its one slot holds a whole subgroup. In our schedule the pieces of that subgroup pass through slots.
    piece = max((size for unit in setup.units for size in pieces(setup, unit)), default=0)
    slot_bytes = round(OPTIMIZERS[setup.given.optimizer].state_bytes_per_param * (setup.given.subgroup_params - piece))
    for stride in strides:
        options = engine | {"host_update": HostUpdate.DEVICE_CAST, "num_state_slots": 1}
        if total >= stride:
            options["device_buffer_bytes"] = engine["device_buffer_bytes"] + slot_bytes
        for activations in ACTIVATIONS:
            yield decide(setup, "interleaved", activations, functools.partial(place, stride), **options)
