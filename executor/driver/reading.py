"""Says whether the weights of a prepared model can be read by code that does not know of its session."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.driver.runtime import Runtime


def why_unreadable(runtime: "Runtime", name: str, *, alone: bool = False) -> str:
    """Return why a parameter's weights cannot be read now, and what to do; empty if they can.

    If ``alone``, other ranks do not read them now.
    """
    frozen, why = runtime.state.frozen_by_parameter.get(name), ""
    if frozen is not None and frozen[0][1].shard.stored.is_quantized:
        why = "it is quantized; take it from model.state_dict() or session.full_parameters()"
    elif runtime.is_closed:
        why = "its session is closed; take it from the model again, whose parameters are ordinary ones now"
    elif (alone or runtime.divides) and (runtime.gathers_resident or runtime.gathers):
        why = "ranks hold parts of it; let all ranks call session.full_parameters() together, between two steps"
    elif runtime.parked:
        why = (
            "its session is parked; call session.unpark() before you read it or session.full_parameters(), or use "
            "session.stream_weights()"
        )
    elif runtime.machine.stopped:
        why = "its session has failed, and session.full_parameters() too; continue from a checkpoint"
    elif not runtime.inside_iteration or runtime.is_settled(name) or runtime.at_hand(name) is not None:
        pass
    elif not runtime.come_to_rest():
        why = (
            "weights move during an iteration; read it, or session.full_parameters(), after optimizer.step() and "
            "before the next forward"
        )
    return why
