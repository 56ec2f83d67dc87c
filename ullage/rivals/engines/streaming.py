"""Engines that stream layers: everything lives on the host and passes through the device, which also updates it.

ShadowSpill (als244/dataflow) plans when each layer's weights, gradients, activations and optimizer state are on the
device, within a budget of device memory. Of each layer and micro-batch it saves the activations, on the device or on
the host, or only the layer's input, from which it recomputes the rest (``docs/dataflow_sim/recompute.md``). By default
its state is bf16 without a master copy.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from planner.decisions import Activations, Place, UnitDecision
from planner.schedule.tasks import Tier
from planner.search.scoring import ENDLESS, Candidate, Scorer
from planner.setup import Setup, pieces
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import given

# Layers that are on their way to or from the device: one is used while the next one arrives.
_SLOTS = 2
# What the engine's head and loss, in chunks of tokens, hold of the memory that those of ``transformers`` do.
_HEAD_PERCENT = 5
# The search moves so many layers at a time, from one way to save activations to another.
_STEPS = (8, 4, 2, 1)

Counts = tuple[int, int, int]
"""Layers whose activations are kept, layers whose activations are offloaded, layers that are resident."""

_STEP = (-1, 0, 1)
_NEIGHBOURS: Final[tuple[Counts, ...]] = tuple((a, b, c) for a in _STEP for b in _STEP for c in _STEP)

# The same in little time: parts of all layers, one kind of count at a time, and so many simulations at most.
_PARTS = (1, 2, 4, 8)
_AXES: Final[tuple[Counts, ...]] = ((1, 0, 0), (0, 0, 1), (0, 1, 0), (-1, 0, 0), (0, 0, -1), (0, -1, 0))
_MOST_SIMULATIONS = 10
_FEW_MICRO_BATCHES = 2


def streaming(setup: Setup, num_keep: int, num_offload: int, num_resident: int) -> RivalDecisions:
    """Return the decisions of an engine that streams layers and updates them on the device.

    Args:
        setup: the model, the machine and what the user has fixed.
        num_keep: layers whose activations stay on the device: the last ones, which are needed again soonest.
        num_offload: other layers whose activations go to the host, evenly spaced. The rest keeps only its input there.
        num_resident: units, from the first, whose weights and gradients stay on the device.
    """
    segments = setup.swappable
    rest = segments[: max(len(segments) - num_keep, 0)]
    ways: dict[str, Activations] = {segment: "recompute" if segment in rest else "keep" for segment in segments}
    for i in range(min(num_offload, len(rest))):
        ways[rest[(i + 1) * len(rest) // num_offload - 1]] = "offload"
    resident = {unit.name for unit in setup.units[:num_resident]} | set(setup.tied)
    units = {
        unit.name: UnitDecision(
            params="host" if unit.num_weights and unit.name not in resident else "gpu",
            activations=ways.get(unit.segment, "keep"),
            update=(Place.STREAM,) * len(pieces(setup, unit)),
            streamed_gradients="gpu" if setup.given.num_micro_batches == 1 or unit.name in resident else "host",
        )
        for unit in setup.units
    }
    return RivalDecisions(
        **given(setup) | {"zero_stage": 1 if setup.given.data_parallel > 1 else 0},
        policy="streaming",
        fetches_whole="own",
        inputs_on_host=True,
        gradient_path=GradientPath.ON_DEVICE,
        adds_in_products=True,
        num_param_slots=_SLOTS,
        num_state_slots=_SLOTS,
        num_gradient_slots=_SLOTS,
        num_activation_slots=_SLOTS,
        update_start="step" if setup.given.clip else "backward",
        update_order="forward" if setup.given.clip else "backward",
        units=units,
    )


def streamed(setup: Setup) -> Iterator[RivalDecisions]:
    """Yield the placement that needs least memory; :func:`best_streaming` finds the fastest.

    ``ullage plan`` gives the engine the types of the request: it can keep a master copy and moments in fp32.
    """
    yield with_own_head(streaming(setup, 0, 0, 0))


def with_own_head(decisions: RivalDecisions) -> RivalDecisions:
    """Return decisions of an engine that makes logits in chunks, where the model's own head does not."""
    return decisions.model_copy(update={"head_percent": _HEAD_PERCENT})


def best_streaming(setup: Setup, scorer: Scorer) -> Candidate:
    """Return the best candidate of such an engine: from the one that needs least memory, uphill in steps."""
    return _uphill(setup, scorer, streaming, _STEPS, _NEIGHBOURS)


def good_streaming(setup: Setup, scorer: Scorer) -> Candidate:
    """Return a candidate that is nearly as good, after a dozen simulations: what ``ullage plan`` has time for.

    They are of few micro-batches. Further ones change all candidates alike. If all weights and activations can stay, so
    that only state moves, nothing is better.
    """
    num_layers = len(setup.swappable)
    steps = dict.fromkeys(max(num_layers // parts, 1) for parts in _PARTS)
    few = setup.changed(num_micro_batches=min(setup.given.num_micro_batches, _FEW_MICRO_BATCHES))

    def place(setup: Setup, num_keep: int, num_offload: int, num_resident: int) -> RivalDecisions:
        return with_own_head(streaming(setup, num_keep, num_offload, num_resident))

    enough = scorer.num_simulations + _MOST_SIMULATIONS
    if not (everything := scorer.score(place(setup, num_layers, 0, len(setup.units)))).missing_bytes:
        return everything
    found = _uphill(few, scorer, place, tuple(steps), _AXES, enough)
    return scorer.score(found.decisions.model_copy(update={"num_micro_batches": setup.given.num_micro_batches}))


def _uphill(
    setup: Setup,
    scorer: Scorer,
    place: Callable[[Setup, int, int, int], RivalDecisions],
    steps: Sequence[int],
    directions: Sequence[Counts],
    most_simulations: int = ENDLESS,
) -> Candidate:
    """Go from the candidate that needs least memory to the best neighbour, in ever smaller steps."""
    num_layers, num_units = len(setup.swappable), len(setup.units)

    def score(counts: Counts) -> Candidate:
        keep, offload, resident = counts
        return scorer.score(place(setup, keep, offload, min(2 * resident, num_units)))

    def inside(counts: Counts) -> bool:
        keep, offload, resident = counts
        return min(counts) >= 0 and keep + offload <= num_layers and resident <= -(-num_units // 2)

    counts: Counts = (0, 0, 0)
    best = score(counts)
    for step in () if Tier.GPU in best.missing_bytes else steps:  # whatever else it holds comes to the device
        while True:
            moves = ((counts[0] + step * a, counts[1] + step * b, counts[2] + step * c) for a, b, c in directions)
            near = [each for each in moves if inside(each)]
            near = list(itertools.takewhile(lambda _: scorer.num_simulations < most_simulations, near))
            top = min(near, key=lambda each: score(each).order, default=counts)
            if score(top).order >= best.order:
                break
            counts, best = top, score(top)
    return best
