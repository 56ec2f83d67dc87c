"""Engines that stream layers: everything lives on the host and passes through the device, which also updates it.

ShadowSpill (als244/dataflow) plans when each layer's weights, gradients, activations and optimizer state are on the
device, within a budget of device memory. Of each layer and micro-batch it saves the activations, on the device or on
the host, or only the layer's input, from which it recomputes the rest (``docs/dataflow_sim/recompute.md``). By default
its state is bf16 without a master copy.
"""

from collections.abc import Iterator

from planner.decisions import Activations, Decisions, GradientPath, Place, UnitDecision
from planner.engines.setup import Setup, pieces
from planner.habits import Habits

# Layers that are on their way to or from the device: one is used while the next one arrives.
_SLOTS = 2
# What the engine's head and loss, in chunks of tokens, hold of the memory that those of ``transformers`` do.
_HEAD_PERCENT = 5


def streaming(setup: Setup, num_keep: int, num_offload: int, num_resident: int) -> Decisions:
    """Return the decisions of an engine that streams layers and updates them on the device.

    Args:
        setup: the model, the machine and what the user has fixed.
        num_keep: layers whose activations stay on the device: the last ones, which are needed again soonest.
        num_offload: other layers whose activations go to the host, evenly spaced. The rest keeps only its input there.
        num_resident: units, from the first, whose weights and gradients stay on the device.
    """
    segments = setup.swappable
    rest = segments[: max(len(segments) - num_keep, 0)]
    ways: dict[str, Activations] = {segment: "offload-input" if segment in rest else "keep" for segment in segments}
    for i in range(min(num_offload, len(rest))):
        ways[rest[(i + 1) * len(rest) // num_offload - 1]] = "offload"
    resident = {unit.name for unit in setup.units[:num_resident]} | set(setup.tied)
    units = {
        unit.name: UnitDecision(
            params="host" if unit.num_weights and unit.name not in resident else "gpu",
            activations=ways.get(unit.segment, "keep"),
            update=(Place.STREAM,) * len(pieces(setup, unit)),
            streamed_gradients="gpu" if setup.num_micro_batches == 1 or unit.name in resident else "host",
        )
        for unit in setup.units
    }
    return Decisions(
        **setup.given,
        policy="streaming",
        gradient_path=GradientPath.ON_DEVICE,
        num_param_slots=_SLOTS,
        num_state_slots=_SLOTS,
        num_gradient_slots=_SLOTS,
        num_activation_slots=_SLOTS,
        update_start="step" if setup.clip else "backward",
        update_order="forward" if setup.clip else "backward",
        units=units,
    )


def streamed(setup: Setup) -> Iterator[Decisions]:
    """Yield the placement that needs least memory; :func:`planner.search.streaming.best_streaming` finds the fastest.

    ``ullage plan`` gives the engine the types of the request: it can keep a master copy and moments in fp32.
    """
    yield with_own_head(streaming(setup, 0, 0, 0))


def with_own_head(decisions: Decisions) -> Decisions:
    """Return decisions of an engine that makes logits in chunks, where the model's own head does not."""
    return decisions.model_copy(update={"habits": Habits(head_percent=_HEAD_PERCENT)})
