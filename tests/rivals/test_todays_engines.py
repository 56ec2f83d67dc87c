"""Engines of today: LLMQ, and those whose devices share host memory or have copies of it."""

import itertools
from collections import Counter

import pytest
from cases import small_units
from machines import machine

from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Precision, Sharding
from planner.graph import Batch, Elementwise, Gemm, build_graph, units
from planner.models import ModelConfigError, resolve_model
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, MemoryClass, Op, Task, Tier
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.rivals import make_plan
from ullage.rivals.best import best_with_own_kernels
from ullage.rivals.decisions import ONE_COPY, OWN_KERNELS, RivalDecisions
from ullage.rivals.engines.llmq import PLACEMENTS, REMADE, Placement, place
from ullage.rivals.engines.megatrain import mega_train
from ullage.rivals.engines.slideformer import slide_former
from ullage.rivals.engines.streaming import streaming
from ullage.rivals.kernels import llmq
from ullage.rivals.lowering import lower
from ullage.rivals.precision import RivalPrecision

UNITS = small_units("demo-llama", 6)
LAYERS = [unit for unit in UNITS if unit.in_layer]
PARAMS, IN_LAYERS = (sum(unit.num_params for unit in some) for some in (UNITS, LAYERS))
NARROW = RivalPrecision(weights="bf16", state="bf16")


def setup(**given: object) -> Setup:
    return Setup(UNITS, Sharding(**{"clip": False, **given}))  # type: ignore[arg-type]


def lowered(decisions: RivalDecisions) -> Schedule:
    return lower(UNITS, decisions, asynchronous=True)


def of(schedule: Schedule, *ops: Op) -> list[Task]:
    return [task for task in schedule.tasks if task.op in ops]


def moved(schedule: Schedule, *ops: Op) -> int:
    return sum(task.num_bytes for task in of(schedule, *ops))


def held(decisions: RivalDecisions, tier: Tier) -> Counter[MemoryClass]:
    cost = CostModel.of(machine(devices_per_node=8), UNITS, decisions)
    simulation = run_until_steady(lowered(decisions), cost)
    return Counter(memory_peaks(simulation.timeline, simulation.steady, cost)[tier].by_class)


# LLMQ


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3.1-8b"])
@pytest.mark.parametrize("fp8", [None, "device"])
def test_llmq_makes_the_products_of_the_model_and_moves_less(name: str, fp8: str | None) -> None:
    model, batch = resolve_model(name), Batch(2, 512, fp8_products=fp8)  # type: ignore[arg-type]
    plain, own = (units(graph) for graph in (build_graph(model, batch), llmq.build_graph(model, batch)))
    assert [set(unit.parameters) for unit in plain] == [set(unit.parameters) for unit in own]
    for one, other in zip(plain, own, strict=True):
        for way in ("forward", "backward"):
            both = getattr(one, way), getattr(other, way)
            products = [sum(k.flop for k in each if isinstance(k, Gemm)) for each in both]
            assert products[0] == products[1]
            narrow = {k.fp8 for k in both[1] if isinstance(k, Gemm)}
            assert narrow == ({fp8 is not None and other.in_layer} if narrow else set())
    sums = [
        sum(
            k.num_bytes * k.count
            for unit in each
            for k in (*unit.forward, *unit.backward)
            if isinstance(k, Elementwise)
        )
        for each in (plain, own)
    ]
    assert sums[1] < sums[0]


@pytest.mark.parametrize("fp8", [None, "device"])
def test_llmq_keeps_what_its_allocator_lists(fp8: str | None) -> None:
    """Bytes of a token and layer: qkv, att, res_att, res_ffn and mlp_up in bf16, and factors in fp32.

    Beside them ln1, ln2 and swiglu, which are inputs of products, in the type of these.
    """
    model, batch = resolve_model("qwen2.5-7b"), Batch(2, 1024, fp8_products=fp8)  # type: ignore[arg-type]
    wide, qkv, ffn = model.hidden_size, model.query_size + 2 * model.key_value_size, model.ffn_hidden_size
    kept = {
        (): 2 * (3 * wide + qkv + 2 * ffn) + (1 if fp8 else 2) * (2 * wide + ffn),
        ("norms", "swiglu"): 2 * (3 * wide + qkv + 2 * ffn),
        ("norms", "ffn"): 2 * (3 * wide + qkv),
    }
    assert set(kept) == set(REMADE)
    factors = 4 * (2 + model.num_attention_heads)
    for remade, num_bytes in kept.items():
        graph = llmq.build_graph(model, batch, remade)
        layer = [unit for unit in units(graph) if unit.segment == "layers.3"]
        assert sum(unit.saved_bytes for unit in layer) == batch.num_tokens * (num_bytes + factors)


def test_what_llmq_makes_again_costs_time_and_saves_memory() -> None:
    model, batch = resolve_model("qwen2.5-0.5b"), Batch(2, 512)
    found = [units(llmq.build_graph(model, batch, remade)) for remade in REMADE]
    flop = [sum(k.flop for unit in each for k in unit.backward if isinstance(k, Gemm)) for each in found]
    assert flop[0] == flop[1] < flop[2]
    kept = [sum(unit.saved_bytes for unit in each) for each in found]
    assert kept[0] > kept[1] > kept[2]
    passes = [
        sum(k.num_bytes * k.count for unit in each for k in unit.backward if isinstance(k, Elementwise))
        for each in found
    ]
    tokens, e = batch.num_tokens, 2
    again = model.num_layers * tokens * e * (2 * 2 * model.hidden_size + 3 * model.ffn_hidden_size)
    assert passes[1] - passes[0] == passes[2] - passes[0] == again  # two norms and SwiGLU


@pytest.mark.parametrize("name", ["gpt2", "qwen3-4b", "mixtral-8x7b"])
def test_llmq_has_no_layers_of_another_kind(name: str) -> None:
    with pytest.raises(ModelConfigError, match="are known of models with RMS norms, SwiGLU and no experts, not of"):
        llmq.build_graph(resolve_model(name), Batch(2, 512))


@pytest.mark.parametrize("products", [None, "fp8"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_llmq_fetches_whole_layers_and_updates_shares_of_them(ranks: int, products: str | None) -> None:
    """In fp8, what is fetched is one byte a value; what is updated goes to the host in both types."""
    some = setup(data_parallel=ranks, num_micro_batches=3, precision=NARROW.model_copy(update={"products": products}))
    there, fetched = (place(some, each, "keep") for each in (PLACEMENTS[1], PLACEMENTS[3]))
    assert not of(lowered(there), Op.FETCH)
    schedule = lowered(fetched)
    uses = Counter(task.unit for task in of(schedule, Op.FETCH))
    width = 1 if products else 2
    assert {(task.unit, task.num_bytes) for task in of(schedule, Op.FETCH)} == {
        (unit.name, width * unit.num_params) for unit in LAYERS
    }
    assert max(uses.values()) == 6  # forward and backward of three micro-batches
    assert {task.unit for task in of(schedule, Op.GATHER)} <= {unit.name for unit in UNITS} - {u.name for u in LAYERS}
    share, layers = PARAMS / ranks, IN_LAYERS / ranks
    assert moved(schedule, Op.LOAD) == pytest.approx(4 * share + 2 * layers, rel=1e-3)  # moments; layers' weights
    assert moved(schedule, Op.STORE) == pytest.approx(4 * share + (2 + (products is not None)) * layers, rel=1e-3)
    if ranks > 1:
        scattered = [task for task in of(schedule, Op.SCATTER) if task.unit in uses]
        assert Counter(task.unit for task in scattered) == dict.fromkeys(uses, 3)  # sharded gradients, as they are made


def test_llmqs_gradients_on_the_host_are_there_until_the_step() -> None:
    some = setup(num_micro_batches=2, precision=NARROW, clip=True)
    stay, leave = (lowered(place(some, each, "keep")) for each in PLACEMENTS[-2:])
    assert not of(stay, Op.OVERWRITE)
    assert moved(leave, Op.OVERWRITE) == 2 * 2 * IN_LAYERS
    assert moved(leave, Op.LOAD) - moved(stay, Op.LOAD) == 2 * 2 * IN_LAYERS  # for the second sum, and for the update
    kept, gone = (held(place(some, each, "keep"), Tier.GPU)[MemoryClass.GRADIENTS] for each in PLACEMENTS[-2:])
    assert gone < kept - IN_LAYERS


def test_llmq_launches_graphs() -> None:
    decisions = place(setup(), Placement(), "keep")
    assert {task.num_kernels for task in of(lowered(decisions), Op.ISSUE)} == {1}


def test_a_plan_has_a_row_of_llmq_in_its_own_kernels() -> None:
    request = Request(
        resolve_model("qwen2.5-0.5b"), machine(gpu_bytes=2e10, devices_per_node=2), num_devices=2, global_batch=8
    )
    plan = make_plan(request, 20)
    row = next(row for row in plan.engines if row.name == "llmq")
    assert row.fits
    assert row.setting.endswith(OWN_KERNELS)
    assert all(OWN_KERNELS not in each.setting for each in plan.engines if each is not row)
    assert row.numerics == "no master copy beside weights in bf16"
    (variant,) = variants(Request(request.model, request.hardware, num_devices=2, micro_batch=4, num_micro_batches=1))[
        :1
    ]
    found = best_with_own_kernels(variant, "llmq")
    assert found
    assert found[0].setup.units != variant.setup.units
    assert {d.kind for unit in found[0].setup.units for d in unit.operators} >= {"norm", "loss"}
    same = Precision(weights="bf16", master="bf16")
    ours = make_plan(
        Request(request.model, request.hardware, global_batch=4, precision=same, optimizer="adamw-bf16"), 20
    )
    assert next(row for row in ours.engines if row.name == "llmq").numerics is None


# Devices that share host memory


@pytest.mark.parametrize("engine", [mega_train, slide_former])
def test_devices_of_a_node_share_one_copy_and_move_all_of_it(engine: object) -> None:
    """Every device fetches and copies what a single one does; the node's memory is held once, and updated once."""
    (one, *_), (four, *_) = (list(engine(setup(data_parallel=ranks))) for ranks in (1, 4))  # type: ignore[operator]
    alone, shared = lowered(one), lowered(four)
    for op in (Op.FETCH, Op.OVERWRITE):
        assert moved(alone, op) == pytest.approx(moved(shared, op), rel=1e-3)
        assert moved(alone, op)
    assert not of(shared, Op.GATHER, Op.SCATTER)
    updated = [sum(task.num_params for task in of(each, Op.UPDATE)) for each in (alone, shared)]
    assert updated[0] == pytest.approx(4 * updated[1], rel=1e-3)
    assert moved(alone, Op.UPLOAD) == pytest.approx(moved(shared, Op.UPLOAD), rel=1e-3)
    state = [held(each, Tier.HOST)[MemoryClass.OPTIMIZER] for each in (one, four)]
    assert state[0] == pytest.approx(state[1], rel=1e-3)
    assert four.shared_in_words == ONE_COPY
    grown = [held(each, Tier.GPU)[MemoryClass.GRADIENTS] for each in (one, four)]
    assert grown[0] == pytest.approx(grown[1], rel=1e-3)


def test_gradients_of_devices_are_added_up_one_after_another() -> None:
    """Passes of a rank are on its share of the host, so that all of them together take as long as there are ranks."""
    one, four = (next(mega_train(setup(data_parallel=ranks))) for ranks in (1, 4))
    passes = [
        sum(task.num_bytes for task in of(lowered(each), Op.PASS) if task.phase == "backward") for each in (one, four)
    ]
    assert passes[0] == pytest.approx(passes[1], rel=1e-3)
    assert passes[0]


def test_slideformer_casts_before_each_fetch_and_updates_as_gradients_arrive() -> None:
    decisions = next(slide_former(setup()))
    schedule = lowered(decisions)
    tasks = schedule.tasks
    for fetch in of(schedule, Op.FETCH):
        (cast,) = [tasks[key] for key in fetch.after if tasks[key].op is Op.PASS]
        assert (cast.lane, cast.unit) == (Lane.CPU, fetch.unit)
        assert cast.num_bytes == 3 * fetch.num_bytes  # four bytes read and two written, of which two are fetched
    last = max(task.index for task in of(schedule, Op.BACKWARD))
    assert min(task.index for task in of(schedule, Op.UPDATE)) < last
    updates = {task.unit: task.index for task in of(schedule, Op.UPDATE)}
    for before, copy in itertools.pairwise(of(schedule, Op.OVERWRITE)):
        assert updates[before.unit] in copy.after
    host = held(decisions, Tier.HOST)
    assert host[MemoryClass.PARAMETERS] == 0  # "about 12 GB CPU RAM per 1B parameters": no weights beside masters
    assert host[MemoryClass.OPTIMIZER] == 12 * PARAMS


# Devices with host memory of their own


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_shadowspills_ranks_reduce_once_and_update_slices(num_rounds: int) -> None:
    """``zero1rs`` of als244/dataflow: a reduce-scatter of all gradients, slices of state, an all-gather of weights."""
    one, four = (
        streaming(setup(data_parallel=ranks, num_micro_batches=num_rounds, precision=NARROW), 0, 0, 0)
        for ranks in (1, 4)
    )
    alone, shared = lowered(one), lowered(four)
    assert four.zero_stage == 1
    scattered = of(shared, Op.SCATTER)
    assert Counter(task.unit for task in scattered) == {unit.name: 1 for unit in UNITS if unit.num_params}
    assert moved(shared, Op.SCATTER) == pytest.approx(2 * PARAMS, rel=1e-3)
    assert moved(shared, Op.GATHER) == pytest.approx(2 * PARAMS, rel=1e-3)
    assert moved(alone, Op.FETCH) == pytest.approx(moved(shared, Op.FETCH), rel=1e-3)
    assert moved(alone, Op.OVERWRITE) == pytest.approx(moved(shared, Op.OVERWRITE), rel=1e-3)  # between rounds, whole
    loads = [moved(each, Op.LOAD) - moved(each, Op.OVERWRITE) for each in (alone, shared)]
    assert loads[0] == pytest.approx(4 * loads[1], rel=1e-3)  # state, but not weights, which are there
    fetched = sum(unit.num_params for unit in UNITS if four.units[unit.name].fetched)
    stored = [moved(each, Op.STORE) for each in (alone, shared)]
    assert stored[1] == pytest.approx((stored[0] - 2 * fetched) / 4 + 2 * fetched, rel=1e-3)
    per_node = held(four, Tier.HOST)
    assert per_node[MemoryClass.PARAMETERS] + per_node[MemoryClass.OPTIMIZER] == pytest.approx(
        4 * (2 * fetched) + 4 * PARAMS + 2 * (PARAMS - fetched), rel=0.1
    )


def test_a_model_of_another_kind_has_no_row_of_llmq() -> None:
    request = Request(resolve_model("gpt2"), machine(gpu_bytes=2e10), global_batch=4, seq_len=512)
    assert all(best_with_own_kernels(variant, "llmq") is None for variant in variants(request))
