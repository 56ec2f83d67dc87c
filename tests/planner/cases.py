"""Small models and random decisions."""

import dataclasses
import functools
from typing import get_args

import numpy as np
from hypothesis import strategies as st

from planner.costs.resources import Price, Resource
from planner.decisions import (
    BF16,
    FP32,
    Activations,
    Decisions,
    Place,
    Precision,
    Sharding,
    UnitDecision,
)
from planner.graph import Batch, Unit, build_graph, units
from planner.models import resolve_model
from planner.optimizers import OPTIMIZERS
from planner.placements import mixed
from planner.schedule.schedule import Schedule
from planner.setup import Mix, Setup
from ullage.rivals.decisions import GradientPath, HostUpdate, RivalDecisions
from ullage.rivals.lowering import lower
from ullage.rivals.precision import RivalPrecision

MODELS = ("demo-llama", "gpt2", "opt-125m")  # the last two have tied embeddings


@functools.cache
def small_units(
    model: str = "demo-llama",
    num_layers: int = 2,
    micro_batch: int = 1,
    frozen: frozenset[str] = frozenset(),
    tensor_parallel: int = 1,
    *,
    in_fp8: bool = False,
    num_tiles: int = 1,
    splits_backward: bool = False,
    **degrees: int,
) -> tuple[Unit, ...]:
    """Return the units of a model that has lost most of its layers, with some parameters ``frozen``.

    With ``in_fp8`` its products are in fp8. So many tiles of ``micro_batch`` sequences pass a layer.
    """
    config = resolve_model(model).model_copy(update={"num_layers": num_layers})
    products = "device" if in_fp8 else None
    batch = Batch(
        micro_batch * num_tiles,
        seq_len=64,
        tensor_parallel=tensor_parallel,
        fp8_products=products,
        segment_tile_sequences=micro_batch if num_tiles > 1 else None,
        splits_backward=splits_backward,
        **degrees,
    )
    operators = []
    for operator in build_graph(config, batch):
        specs = tuple(
            dataclasses.replace(spec, frozen="plain" if spec.name in frozen else None) for spec in operator.parameters
        )
        operators.append(dataclasses.replace(operator, parameters=specs))
    return units(operators)


def decide(model_units: tuple[Unit, ...], place: Place = Place.CPU, *, recompute: bool = False, **options) -> Decisions:
    """Return decisions that treat all units alike."""
    params = options.pop("params", "gpu")
    activations = options.pop("activations", "recompute" if recompute else "keep")
    kind = RivalDecisions if options.keys() - Decisions.model_fields.keys() else Decisions
    empty = kind(policy="test", units={}, **options)
    return kind(
        policy="test",
        **options,
        units={
            unit.name: UnitDecision(
                params=params if unit.num_params else "gpu",
                activations=activations if unit.recompute else "keep",
                update=(place,) * len(empty.piece_params(unit)),
            )
            for unit in model_units
        },
    )


def as_rival(decided: Decisions) -> RivalDecisions:
    """Return decisions with what other engines do: what ours does."""
    return decided if isinstance(decided, RivalDecisions) else RivalDecisions.model_validate(dict(decided))


TYPES = (BF16, FP32, Precision(weights="bf16", master="bf16"))
TYPES_OF_OTHERS = (*TYPES, RivalPrecision(weights="bf16", state="bf16"))


@st.composite
def decisions(draw: st.DrawFn, model_units: tuple[Unit, ...], *, in_fp8: bool = False, ours: bool = False) -> Decisions:
    """Return anything that we, or unless ``ours`` other engines, can decide; if ``in_fp8``, with products in fp8."""
    clip, ours = draw(st.booleans()), ours or draw(st.booleans())
    # Engines with passes over host memory have tests of their own.
    paths = [path for path in GradientPath if path is not GradientPath.BUFFERED]
    gradient_path = draw(st.sampled_from([GradientPath.ONCE] if ours else paths))
    on_device, fsdp2 = gradient_path is GradientPath.ON_DEVICE, gradient_path is GradientPath.FSDP2
    ranks = 1 if on_device else draw(st.sampled_from([1, 1, 2, 4]))
    options = {
        "precision": draw(st.sampled_from(TYPES if ours else TYPES_OF_OTHERS)),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "num_micro_batches": draw(st.integers(1, 3)),
        "data_parallel": ranks,
        "zero_stage": 3 if fsdp2 else draw(st.integers(0, 3)),
        "subgroup_params": draw(st.sampled_from([400_000, 1_000_000, 100_000_000])),
        "num_param_slots": draw(st.integers(1, 3)),
        "num_state_slots": draw(st.integers(1, 3)),
        "update_order": draw(st.sampled_from(["forward", "backward"])),
        "update_start": "step" if clip else draw(st.sampled_from(["step", "backward"])),
        "overlap_next_forward": draw(st.booleans()),
        "clip": clip,
        "num_nvme_slots": draw(st.integers(1, 3)),
        "num_activation_slots": draw(st.integers(1, 3)),
        "num_gradient_slots": draw(st.integers(1, 4)),
        "spill_gradients": draw(st.booleans()),
    }
    if ours and clip and options["optimizer"] == "adamw" and draw(st.booleans()):
        options |= {"speculate": True, "update_start": draw(st.sampled_from(["step", "backward"]))}
    if not ours:
        options |= {
            "max_prefetch_params": draw(st.sampled_from([None, 0, 400_000])),
            "max_reuse_params": draw(st.sampled_from([None, 0, 400_000])),
            "host_update": draw(st.sampled_from(HostUpdate)),
            "gradient_path": gradient_path,
            "inputs_on_host": draw(st.booleans()),
        }
    if in_fp8:
        options["precision"] = options["precision"].model_copy(update={"products": "fp8"})
        can = OPTIMIZERS[options["optimizer"]].others is None and not fsdp2
        options["fp8_weights"] = draw(st.sampled_from([True, True, None])) if can else None
    kind = Decisions if ours else RivalDecisions
    empty = kind(policy="random", units={}, **options)
    segments = sorted({unit.segment for unit in model_units if unit.recompute})
    activations = {segment: draw(st.sampled_from(get_args(Activations))) for segment in segments}
    never_on_host = ranks > 1 and options["zero_stage"] in {1, 2}
    chosen = {}
    for unit in model_units:
        anywhere = unit.num_weights > 0 and not (never_on_host and unit.num_params)
        params = draw(st.sampled_from(["gpu", "host"] if on_device else ["gpu", "host", "nvme"])) if anywhere else "gpu"
        places = {"gpu": list(Place), "host": [Place.CPU, Place.STREAM, Place.NVME], "nvme": [Place.NVME]}[params]
        places = [place for place in places if not (on_device and place in {Place.CPU, Place.NVME})]
        if fsdp2:  # all or nothing
            params, places = "host" if unit.num_weights else "gpu", [Place.CPU]
        count = len(empty.piece_params(unit))
        update = draw(st.lists(st.sampled_from(places), min_size=count, max_size=count))
        chosen[unit.name] = UnitDecision(
            params=params,
            activations=activations.get(unit.segment, "keep"),
            update=tuple(update),
            streamed_gradients=draw(st.sampled_from(["gpu", "host"])),
        )
    return kind(policy="random", units=chosen, **options)


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model, and what was decided for it."""

    model: str
    num_layers: int
    decisions: Decisions
    asynchronous: bool
    frozen: frozenset[str] = frozenset()
    in_fp8: bool = False
    num_tiles: int = 1

    @property
    def units(self) -> tuple[Unit, ...]:
        options = {"in_fp8": self.in_fp8, "num_tiles": self.num_tiles}
        options["splits_backward"] = self.decisions.pipeline_order is not None
        return small_units(self.model, self.num_layers, frozen=self.frozen, **options)

    @functools.cached_property
    def schedule(self) -> Schedule:
        return lower(self.units, self.decisions, asynchronous=self.asynchronous)

    @functools.cached_property
    def taken(self) -> Schedule:
        """The same with the tasks that take snapshots."""
        return lower(self.units, self.decisions, asynchronous=self.asynchronous, takes_snapshots=True)


@st.composite
def cases(draw: st.DrawFn, *, in_fp8: bool = False, ours: bool = False, tiled: bool = False) -> Case:
    """Return a random case; if ``in_fp8``, one whose products are in fp8, and perhaps the weights that move.

    If ``tiled``, some tiles of sequences pass a layer one after another.
    """
    models = [model for model in MODELS if not (in_fp8 and model == "gpt2")]
    model, num_layers = draw(st.sampled_from(models)), draw(st.integers(1, 3))
    frozen = draw(masks(small_units(model, num_layers)))
    chosen = draw(decisions(small_units(model, num_layers, frozen=frozen, in_fp8=in_fp8), in_fp8=in_fp8, ours=ours))
    num_tiles = draw(st.integers(2, 4)) if tiled else 1
    return Case(model, num_layers, chosen, draw(st.booleans()), frozen, in_fp8, num_tiles)


@st.composite
def masks(draw: st.DrawFn, model_units: tuple[Unit, ...]) -> frozenset[str]:
    """Return the names of frozen parameters: none, those of adapters' bases, whole units, or any."""
    names = [spec.name for unit in model_units for spec in unit.parameters]
    resident = draw(st.sampled_from(names))
    kind = draw(st.sampled_from(["none", "none", "all but some", "units", "any"]))
    if kind == "none":
        return frozenset()
    if kind == "units":
        whole = [unit for unit in model_units if unit.parameters and draw(st.booleans())]
        return frozenset(spec.name for unit in whole for spec in unit.parameters) - {resident}
    if kind == "all but some":
        return frozenset(names) - {resident} - draw(st.sets(st.sampled_from(names), max_size=3))
    return frozenset(draw(st.sets(st.sampled_from(names)))) - {resident}


def staged(setup: Setup, num_kept: int, zero_stage: int = 0) -> Decisions:
    """Return decisions with everything on the devices of a pipeline, where so many segments keep their activations."""
    return mixed(setup, Mix(sum(setup.movable.values()), 0, num_kept, zero_stage=zero_stage))


@st.composite
def pipelines(draw: st.DrawFn) -> Case:
    """Return a random case whose layers are shared by stages."""
    model, num_stages = draw(st.sampled_from(MODELS)), draw(st.integers(2, 3))
    num_layers = draw(st.integers(num_stages, 4))
    setup = Setup(
        small_units(model, num_layers),
        Sharding(
            data_parallel=draw(st.sampled_from([1, 2])),
            pipeline_parallel=num_stages,
            num_micro_batches=draw(st.integers(1, 4)),
        ),
    )
    decided = staged(setup, draw(st.integers(0, num_layers)), draw(st.sampled_from([0, 1])))
    return Case(model, num_layers, decided, draw(st.booleans()))


@st.composite
def in_stages(draw: st.DrawFn) -> Case:
    """Return a random case of ours whose layers are shared by stages, perhaps in rounds, with anything anywhere."""
    model, num_stages, num_rounds = draw(st.sampled_from(MODELS)), draw(st.integers(2, 3)), draw(st.integers(1, 3))
    num_layers = num_stages * num_rounds + draw(st.integers(0, 2))
    drawn = draw(decisions(small_units(model, num_layers), ours=True))
    given = {"pipeline_parallel": num_stages, "pipeline_rounds": num_rounds, "update_start": "step"}
    given |= {"num_micro_batches": draw(st.integers(1, 5)), "spill_gradients": False}
    if not drawn.why_not_apart:
        given["pipeline_order"] = draw(st.sampled_from([None, "zero-bubble"]))
    return Case(model, num_layers, Decisions.model_validate(dict(drawn) | given), draw(st.booleans()))


def random_prices(schedule: Schedule, seed: int) -> tuple[list[Price], dict[Resource, float]]:
    """Return prices that mean nothing: very short, very long and zero durations, shared resources or none."""
    rng = np.random.default_rng(seed)
    prices = []
    for _ in schedule.tasks:
        resources = sorted(rng.choice(len(Resource), size=rng.integers(3), replace=False).tolist())
        uses = tuple((Resource(r), float(rng.uniform(0.1, 1.0))) for r in resources)
        duration_s = float(rng.choice([0.0, 1.0, rng.exponential(), 100 * rng.exponential()]))
        prices.append(Price(float(rng.choice([0.0, rng.exponential(0.1)])), duration_s, uses))
    return prices, dict.fromkeys(Resource, 1.0)
