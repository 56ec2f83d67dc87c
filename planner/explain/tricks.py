"""The worth of each trick of a plan: switch off one at a time and simulate again.

A trick is a row of :data:`TRICKS`: a way to change the decisions so that the plan does not use it. If there are several
ways, the best one that fits counts, so that a trick is not credited with a bad alternative. A new trick is a new row.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from planner.decisions import Decisions, Place
from planner.explain.bench import Bench, changed
from planner.models.config import ModelConfigError
from planner.optimizers import OPTIMIZERS
from planner.search.scoring import Candidate

Off = Callable[[Bench], Iterator[Decisions]]


@dataclasses.dataclass(frozen=True)
class Trick:
    """A technique of good schedules.

    Attributes:
        key: its name for scripts.
        words: the technique in words.
        without: what happens instead if it is off, in words.
        off: yields decisions without it; nothing if the plan does not use it.
    """

    key: str
    words: str
    without: str
    off: Off


def worths(
    bench: Bench, progress: Callable[[int], object] = lambda _: None, tricks: Sequence[Trick] | None = None
) -> dict[Trick, Candidate | None]:
    """Switch off one trick at a time, and return the best without each; ``None`` if the plan does not use it.

    Args:
        bench: the plan.
        progress: called with the number done.
        tricks: those to switch off; by default :data:`TRICKS`.
    """
    found = {}
    for done, trick in enumerate(TRICKS if tricks is None else tricks):
        progress(done)
        found[trick] = without(bench, trick)
    return found


def without(bench: Bench, trick: Trick) -> Candidate | None:
    """Return the best that can be done without a trick, or ``None`` if the plan does not use it.

    A plan does not use a trick if the schedule stays the same without it.
    """
    own = (bench.schedule.tasks, bench.schedule.buffers)
    schedules = ((decisions, bench.lower(decisions)) for decisions in trick.off(bench))
    other = [decisions for decisions, schedule in schedules if (schedule.tasks, schedule.buffers) != own]
    return min((bench.trial(decisions) for decisions in other), key=lambda trial: trial.order, default=None)


def with_compiled_kernels(bench: Bench) -> Candidate | None:
    """Return the plan with compiled kernels; ``None`` if it has others than those of ``transformers``, or they cannot.

    They are for GPUs, and change the last bits of losses.
    """
    if bench.plan.hardware.device.kind != "gpu" or bench.decisions.kernels not in {None, "transformers"}:
        return None
    if any(unit.offloads for unit in bench.decisions.units.values()):  # compiled blocks offload no activations
        return None
    with suppress(ValueError):  # not known of the model, or not beside another choice of the plan
        return bench.trial(changed(bench.decisions, kernels="compiled"))
    return None


def with_speculation(bench: Bench) -> Candidate | None:
    """Return the best plan with updates that begin before the norm is known; ``None`` if none can or none has to wait.

    Gradients stay on the device for longer, so resident state may have to leave. Bits change where a step clips.
    """
    if not bench.decisions.waits_for_norm or bench.decisions.pipeline_parallel > 1:
        return None
    early = {"speculate": True, "update_start": "backward", "update_order": "backward"}
    with suppress(ValueError):  # not with this optimizer
        trials = (bench.trial(changed(other, **early)) for other in _with_less_resident(bench))
        return min(trials, key=lambda trial: trial.order)
    return None


def _options(**options: object) -> Off:
    """Return the switch for a trick that depends on options that all units share."""

    def off(bench: Bench) -> Iterator[Decisions]:
        if any(getattr(bench.decisions, name) != value for name, value in options.items()):
            yield changed(bench.decisions, **options)

    return off


def _forward_order(bench: Bench) -> Iterator[Decisions]:
    if bench.decisions.update_start == "step":  # updates during backward are in backward order anyway
        yield from _options(update_order="backward")(bench)


def _several_places(bench: Bench) -> Iterator[Decisions]:
    used = [place for place in Place if bench.pieces(place)]
    if len(used) > 1:
        for only in (Place.GPU, Place.STREAM, Place.CPU):
            yield bench.placed(dict.fromkeys(bench.pieces(), only))


def _shares_by_rate(bench: Bench) -> Iterator[Decisions]:
    away = bench.pieces(Place.STREAM, Place.CPU)
    if len(away) > 1:
        for turns in ((Place.STREAM, Place.CPU), (Place.CPU, Place.STREAM)):
            yield bench.placed(dict(zip(away, itertools.cycle(turns), strict=False)))


def _resident_state(bench: Bench) -> Iterator[Decisions]:
    alone = bench.decisions.pipeline_parallel == 1  # what moves in stages is not tried otherwise
    if alone and (resident := bench.pieces(Place.GPU)):
        for instead in (Place.STREAM, Place.CPU):
            yield bench.placed(dict.fromkeys(resident, instead))


def _nearest_deadline(bench: Bench) -> Iterator[Decisions]:
    """Give the same number of subgroups resident state, but those whose deadline is farthest."""
    order, resident = bench.pieces(), bench.pieces(Place.GPU)
    if not 0 < len(resident) < len(order):
        return
    places = [bench.decisions.units[name].update[piece] for name, piece in order]
    last = [place for place in places if place is not Place.GPU] + [Place.GPU] * len(resident)
    later = bench.placed(dict(zip(order, last, strict=True)))
    # The same number of units keeps parameters on the host: now the first ones, which are not updated on the device.
    count = sum(unit.params == "host" for unit in bench.decisions.units.values())
    away = (name for name in bench.units if bench.fetchable(name) and Place.GPU not in later.units[name].update)
    chosen = set(itertools.islice(away, count))
    yield bench.with_units(
        {
            name: unit.model_copy(update={"params": "host" if name in chosen else "gpu"})
            for name, unit in later.units.items()
        }
    )


def _resident_parameters(bench: Bench) -> Iterator[Decisions]:
    decided = bench.decisions.units
    here = [name for name in decided if bench.fetchable(name) and decided[name].params == "gpu"]
    here = [name for name in here if Place.GPU not in decided[name].update]
    if here:
        yield bench.with_each(here, params="host")


def _each_its_own(bench: Bench) -> Iterator[Decisions]:
    names = [name for name in bench.units if bench.recomputable(name)]
    if len({bench.decisions.units[name].activations for name in names}) > 1:
        for way in ("keep", "recompute"):
            yield bench.with_each(names, activations=way)


def _all_gradients_leave(bench: Bench) -> Iterator[Decisions]:
    units = bench.decisions.units.items()
    if staying := [name for name, unit in units if Place.STREAM in unit.update and unit.streamed_gradients == "gpu"]:
        yield bench.with_each(staying, streamed_gradients="host")


def _with_less_resident(bench: Bench) -> Iterator[Decisions]:
    """Yield the plan's decisions, and those with some or all of the resident state streamed or on the CPU."""
    yield bench.decisions
    resident = bench.pieces(Place.GPU) if bench.decisions.pipeline_parallel == 1 else []
    for share, instead in itertools.product((8, 4, 2), (Place.STREAM, Place.CPU)):
        if away := resident[len(resident) - len(resident) // share :]:  # those whose next forward is last
            yield bench.placed(dict.fromkeys(away, instead))
    yield from _resident_state(bench)


def _wide_state(bench: Bench) -> Iterator[Decisions]:
    if wide := OPTIMIZERS[bench.decisions.optimizer].wide:
        precision = bench.decisions.precision.model_copy(update={"master": None})
        for other in _with_less_resident(bench):
            yield changed(other, optimizer=wide, precision=precision)


def _without(field: str) -> Off:
    def off(bench: Bench) -> Iterator[Decisions]:
        if getattr(bench.decisions, field) is None:
            return
        for other in _with_less_resident(bench):  # what is needed instead may be the memory of resident state
            whole = changed(other, **{field: None})
            with suppress(ModelConfigError):  # a captured model may be known with tiles only
                bench.plan.units(whole)
                yield whole

    return off


def _kernel_for_each_operation(bench: Bench) -> Iterator[Decisions]:
    if bench.decisions.kernels not in {None, "transformers"}:
        recomputing = bench.with_each(filter(bench.recomputable, bench.units), activations="recompute")
        for other in (recomputing, *_with_less_resident(bench)):  # plain kernels save more
            yield changed(other, kernels=None)


def _products_in_weights_type(bench: Bench) -> Iterator[Decisions]:
    precision = bench.decisions.precision
    if precision.products:
        for other in _with_less_resident(bench):
            yield changed(other, precision=precision.model_copy(update={"products": None}), fp8_weights=None)


TRICKS: tuple[Trick, ...] = (
    Trick(
        "gradients-stay",
        "gradients of streamed updates stay on the device",
        "they leave and come back",
        _all_gradients_leave,
    ),
    Trick(
        "overlap-next-forward",
        "updates run beside the next forward",
        "the next iteration waits",
        _options(overlap_next_forward=False),
    ),
    Trick("forward-order", "updates in the order of the next forward", "in the order of backward", _forward_order),
    Trick("early-updates", "updates start during backward", "they start at the step", _options(update_start="step")),
    Trick("several-places", "CPU, resident, streamed updates at once", "all in the best one place", _several_places),
    Trick("shares-by-rate", "CPU and streamed updates shared by rate", "every second one streamed", _shares_by_rate),
    Trick("resident-state", "spare device memory holds optimizer state", "streamed, or on the CPU", _resident_state),
    Trick(
        "nearest-deadline", "resident state where the deadline is nearest", "where it is farthest", _nearest_deadline
    ),
    Trick(
        "resident-parameters", "parameters resident where there is room", "fetched for every use", _resident_parameters
    ),
    Trick("recompute-by-layer", "each layer keeps or recomputes by itself", "all one way, the better", _each_its_own),
    Trick("loss-in-tiles", "the loss in tiles of tokens", "all logits at once", _without("loss_tile_tokens")),
    Trick("layers-in-tiles", "norms and MLPs in tiles of tokens", "all tokens at once", _without("layer_tile_tokens")),
    Trick(
        "breadth-order",
        "some sequences pass a layer at a time",
        "the whole micro-batch at once",
        _without("segment_tile_sequences"),
    ),
    Trick(
        "joined-kernels",
        "one kernel for all between two products",
        "one for each operation",
        _kernel_for_each_operation,
    ),
    Trick("fp8-products", "products of hidden layers in fp8", "in the type of weights", _products_in_weights_type),
    Trick(
        "fp8-weights",
        "weights fetched or gathered in fp8",
        "in their own type, cast for every use",
        _without("fp8_weights"),
    ),
    Trick(
        "zero-bubble",
        "gradients of weights where stages would wait",
        "backward makes them",
        _options(pipeline_order=None),
    ),
    Trick(
        "ring", "keys pass among ranks of a sequence", "they exchange tokens for heads", _without("context_exchange")
    ),
    Trick("through-host", "collectives go through the host", "over the fabric", _options(collectives=None)),
    Trick("split-masters", "master copies as weights and remainders", "whole, in fp32", _without("split_masters")),
    Trick("narrow-state", "optimizer state in fewer bytes", "all of it in fp32", _wide_state),
    Trick("parameter-slots", "several slots for parameters", "one slot: no look-ahead", _options(num_param_slots=1)),
    Trick(
        "state-slots", "several slots for streamed state", "one slot: in and out in turn", _options(num_state_slots=1)
    ),
)
