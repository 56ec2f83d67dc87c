"""Says where code that does not know of a session can read the weights of its model."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from executor.driver.runtime import Runtime


def where_readable(
    runtime: "Runtime", name: str, *, alone: bool = False, is_held: bool = False
) -> Literal["at rest", "settled", "at hand"]:
    """Return where a parameter's weights can be read now.

    Args:
        runtime: of the session.
        name: the parameter.
        alone: other ranks do not read them now.
        is_held: the reader has the current weights whole, as tensors of ``state_dict()`` do.

    Returns:
        ``at rest``: where the plan keeps them, because no weights move; ``settled``: on the device, until updates
        begin; ``at hand``: in what its unit computes with.

    Raises:
        ValueError: they cannot be read; says why, and what to do.
    """
    frozen, why = runtime.state.frozen_by_parameter.get(name), ""
    if frozen is not None and frozen[0][1].shard.stored.is_quantized:
        why = "it is quantized; take it from model.state_dict() or session.full_parameters()"
    elif runtime.is_closed:
        why = "its session is closed; take it from the model again, whose parameters are ordinary ones now"
    elif (alone or runtime.divides) and not is_held and (runtime.gathers_resident or runtime.gathers):
        why = "ranks hold parts of it; let all ranks call session.full_parameters() together, between two steps"
    elif runtime.parked:
        why = (
            "its session is parked; call session.unpark() before you read it or session.full_parameters(), or use "
            "session.stream_weights()"
        )
    elif runtime.machine.stopped:
        why = "its session has failed, and session.full_parameters() too; continue from a checkpoint"
    elif not runtime.inside_iteration:
        return "at rest"
    elif runtime.is_settled(name):
        return "settled"
    elif runtime.at_hand(name) is not None:
        return "at hand"
    elif runtime.come_to_rest():
        return "at rest"
    else:
        why = (
            "weights move during an iteration; read it, or session.full_parameters(), after optimizer.step() and "
            "before the next forward"
        )
    raise ValueError(f"{name} is a parameter of a prepared model, and cannot be read here, because {why}")
