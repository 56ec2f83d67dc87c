"""Check that the executor can fetch all weights of a module before they are read.

The executor fetches the weights of a unit when forward or backward reaches it, which it sees by hooks on modules (see
[Note: Module boundaries] in ``executor.module.binding``). But a module may read weights at a point without a hook.
"""

from collections.abc import Iterator
from typing import NamedTuple

from executor.distributed.shards import BindingError
from executor.module.binding import marked, tiled_modules
from planner.graph import build_graph, units
from planner.models.captured import CapturedModel
from ullage.capture.records import CaptureError, Event, Recording


class Unseen(NamedTuple):
    """A weight that is read while another unit computes, at a point without a hook.

    Attributes:
        weight: its name.
        owner, reading: the units that it belongs to, and that computes then; empty if none does.
        refusal: why the model cannot be captured, unless these units become one.
    """

    weight: str
    owner: str
    reading: str
    refusal: str


def check_executable(recording: Recording, captured: CapturedModel) -> Unseen | None:
    """Check that hooks see the beginning of each unit, in order, before its weights are read; return one that is not.

    Raises:
        CaptureError: a module belongs to several units; the message names it, and the remedy.
    """
    found = units(build_graph(captured, captured.batch))
    names = {unit.name: {*unit.sizes, *(s.name for s in unit.frozen), *unit.shared_parameters} for unit in found}
    try:
        markers = marked(recording.model, found, tiled_modules(recording.model, found))
    except BindingError as error:
        raise CaptureError(f"{str(error).partition(', but')[0]}; put the parts into modules of their own") from error
    begins, ends = dict[int, str](), dict[int, str]()  # visits of modules whose hooks mark a unit, with that unit
    for index, visit in enumerate(recording.visits):
        if (marker := markers.get(visit.module, {}).get(visit.call)) is not None:
            begins |= {index: marker.unit} if marker.begins else {}
            ends |= {index: marker.unit} if marker.ends else {}
    forward = [(recording.visits[visit].first, unit) for visit, unit in begins.items()]
    copied = {copy.path for copy in recording.copies}
    planned = [unit.name for unit in found if unit.segment not in copied and not unit.is_unused]
    if (interrupted := _interrupted(planned, [unit for _, unit in forward])) is not None:
        return interrupted
    owners = {name: unit.name for unit in found for name in (*unit.sizes, *(s.name for s in unit.frozen))}
    found_unseen = _unseen(recording.forward, forward, names)
    # Second-order backward reads weights of any unit, and all are there.
    if found_unseen is None and not captured.second_order:
        backward = [(position, ends[visit]) for visit, position in recording.arrivals if visit in ends]
        # A hook on the model's output reports the last unit. Without one, its weights are still there since forward.
        backward.insert(0, (0, found[-1].name))
        found_unseen = _unseen(recording.backward, backward, names)
    if found_unseen is None:
        return None
    name, reading = found_unseen
    refusal = (
        f"the weight {name} is read where no hook of a module is, in forward or in backward; read it in the forward of "
        "the module that owns it, and return what that makes"
    )
    return Unseen(name, owners.get(name, ""), reading, refusal)


def _interrupted(order: list[str], begun: list[str]) -> Unseen | None:
    """Return the first unit that does not run as a whole, in order, and the one that should have; or ``None``."""
    seen = [unit for index, unit in enumerate(begun) if not index or begun[index - 1] != unit]
    if seen == order:
        return None
    at = next((i for i, (a, b) in enumerate(zip(seen, order, strict=False)) if a != b), min(len(seen), len(order)))
    first, *_ = *seen[at:], *order[at:]
    other = order[at] if at < min(len(seen), len(order)) else order[max(at - 1, 0)]
    refusal = (
        f"{first} does not run without interruption: its modules are called again later, or other modules read their "
        "weights; call each module once in forward, or put modules that alternate into one module"
    )
    return Unseen("", first, other, refusal)


def _unseen(
    events: list[Event], boundaries: list[tuple[int, str]], names: dict[str, set[str]]
) -> tuple[str, str] | None:
    """Return a weight that is read while a unit without it computes, and that unit; ``None`` if there is none.

    Args:
        events: events of forward or of backward.
        boundaries: for each unit in order, the event before which hooks see its beginning.
        names: the weights that are on the device while each unit computes.
    """
    left: Iterator[tuple[int, str]] = iter([*boundaries, (len(events), "")])
    position, following = next(left)
    reading, there = "", set[str]()
    for index, event in enumerate(events):
        while position <= index:
            reading, there = following, names[following]
            position, following = next(left)
        if event.kernels and (missing := [name for name in event.parameters if name not in there]):
            return missing[0], reading
    return None
