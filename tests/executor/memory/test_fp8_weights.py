"""Training whose weights are fetched and gathered in fp8, against the model that torchao converted, in memory."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_failures import failed
from rank_programs import around_training, parked_on_the_way, read_after_each_step, saved, trained
from rank_references import reference as on_ranks
from rank_references import trained_in_memory
from ranks import assert_same_bits
from training import (
    Task,
    assert_memory_is_stated,
    assert_same,
    batches,
    decide,
    delay,
    make_model,
    prepare,
    reference,
    train,
    uniform,
    units_of,
)

from executor.devices.lanes import LaneError
from executor.distributed.ranks import ALONE
from executor.distributed.shards import BindingError
from executor.distributed.watchdog import RankError
from executor.memory.fp8_weights import Fp8Copy
from executor.weights.loading import load
from planner.decisions import Decisions, Fp8Weights
from planner.schedule.tasks import MemoryClass, Tier

float8 = pytest.importorskip("torchao.float8")

TASK = Task("llama", num_micro_batches=2, iterations=3, products="fp8")
OPTIMIZERS = ("adamw", "adamw-8bit", "adamw-bf16-rounded", "sgd", "lion")


@settings(max_examples=examples(21))
@given(
    plans(families=("llama", "llama-tied", "qwen3", "mixtral"), optimizers=OPTIMIZERS, products="fp8"),
    st.integers(0, 99),
)
def test_any_plan_gives_the_bits_of_training_in_memory(plan: tuple[Task, Decisions], seed: int) -> None:
    """On lanes of any speed; and it takes the memory that the plan states."""
    task, decisions = plan
    model, optimizer = prepare(task, decisions)
    with optimizer.session:
        assert_memory_is_stated(optimizer.session)
        delay(optimizer.session, seed)
        seen = train(task, model, optimizer)
        final = {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}
    assert_same((seen, final), reference(task))


def test_compiled_modules_have_the_same_bits() -> None:
    model, optimizer = prepare(TASK, moving(TASK, mixed), compile_blocks="aot_eager")
    with optimizer.session:
        seen = train(TASK, model, optimizer)
        final = {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}
    assert_same((seen, final), reference(TASK))


def test_slots_have_a_byte_for_each_weight() -> None:
    task, held = Task("llama", torch.float32, products="fp8"), []
    for decisions in (decide(task, uniform("host", "cpu")), given := moving(task)):
        _, optimizer = prepare(task, decisions)
        with optimizer.session as session:
            held.append(session.memory()[Tier.GPU].static_bytes[MemoryClass.PARAMETERS])
    shorter = {
        4 * given.padded_params(u) - given.fp8_of(u).slot_bytes for u in units_of(task, given) if given.moves_fp8(u)
    }
    assert len(shorter) == 2  # attention, MLP
    assert held[0] - held[1] == given.num_param_slots * sum(shorter)


def test_scales_are_aligned_behind_shards_of_odd_length() -> None:
    sizes = Fp8Weights(shard_params=33, num_others=48, num_scales=2, num_ranks=3, weight_bytes=2)
    slot, host = (torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in (sizes.slot_bytes, sizes.host_bytes))
    held = Fp8Copy(sizes, ALONE, (), slot, host)
    held.scales[:] = torch.tensor([3.0, 5.0])
    held.others[:] = 7.0
    assert held.scales.tolist() == [3.0, 5.0]


@pytest.mark.part(2)
@pytest.mark.parametrize("size", [2, 1])
def test_training_goes_on_under_the_other_setting(processes: Any, size: int, tmp_path: Path) -> None:
    """From a checkpoint; the weights that come from it are cast before the first fetch."""
    task = dataclasses.replace(TASK, iterations=2)
    narrow = moving(task, mixed, data_parallel=size, zero_stage=3 if size > 1 else 0)
    wide = narrow.model_copy(update={"fp8_weights": None})
    for i, (first, second) in enumerate([(narrow, wide), (wide, narrow)]):
        straight = processes.call(size, saved, task, first, tmp_path / f"{i}")
        resumed = processes.call(size, saved, task, second, tmp_path / f"{i}-again", 1, tmp_path / f"{i}")
        for (_, seen, end), (_, again, same) in zip(straight, resumed, strict=True):
            assert again == seen[3:]  # two losses and a norm of each step
            assert end == same


@pytest.mark.part(2)
@pytest.mark.parametrize("size", [2, 1])
def test_evaluating_saving_and_loading_between_steps(processes: Any, size: int) -> None:
    """Weights that are set from outside are cast before they are used; the closed model has its own casts again."""
    task = Task("llama", torch.float32, products="fp8", iterations=2)
    given = {"data_parallel": size, "zero_stage": 3 if size > 1 else 0}
    ways = (moving(task, choose, **given) for choose in (uniform("host", "stream", "recompute"), mixed))
    assert processes.call(size, around_training, task, *ways) == [[]] * size


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("size", "frozen"),
    [(2, frozenset({"model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"})), (1, ())],
    ids=["2", "1"],
)
def test_parking(processes: Any, size: int, frozen: Any) -> None:
    task = Task("llama", num_micro_batches=2, iterations=3, products="fp8", frozen=frozenset(frozen))
    decisions = moving(task, mixed, data_parallel=size, zero_stage=3 if size > 1 else 0)
    straight = processes.call(size, trained, task, decisions)
    for found, expected in zip(processes.call(size, parked_on_the_way, task, decisions), straight, strict=True):
        assert found[0] == expected[0]
        assert all(found[1][name].tobytes() == weight.tobytes() for name, weight in expected[1].items())


def test_weights_that_are_loaded_later(tmp_path: Path) -> None:
    make_model(Task("llama", TASK.dtype)).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = make_model(TASK)
    model, optimizer = prepare(TASK, moving(TASK, mixed), model)
    with optimizer.session:
        load(optimizer, tmp_path)
        seen = train(TASK, model, optimizer)
        final = {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}
    assert_same((seen, final), reference(TASK))


def test_a_weight_that_ranks_share_is_read_after_each_step(processes: Any) -> None:
    decisions = moving(TASK, data_parallel=2, zero_stage=3)
    for found in processes.call(2, read_after_each_step, TASK, decisions, "model.layers.1.mlp.up_proj.weight"):
        assert len(set(found)) == TASK.iterations
        assert found[-1] == found[-2]


@pytest.mark.parametrize("evaluates", [False, True])
def test_going_back_to_an_earlier_state(*, evaluates: bool) -> None:
    """In one session, whose casts are those of later weights then."""
    task = Task("llama", products="fp8", iterations=2, schedule=False)
    model, optimizer = prepare(task, moving(task))
    with optimizer.session:
        train(task, model, optimizer)
        before = optimizer.state_dict()
        seen = [train(task, model, optimizer)]
        optimizer.load_state_dict(before)
        if evaluates:
            with torch.no_grad():
                tokens = batches(task)[0, 0]
                assert model(input_ids=tokens, labels=tokens).loss.item() == seen[0][0]
        seen.append(train(task, model, optimizer))
    assert seen[0] == seen[1]


def test_a_rank_that_fails_in_a_cast_ends_all(processes: Any) -> None:
    """Though the others wait for it inside of theirs."""
    task = Task("llama", iterations=50, products="fp8")
    processes.begin(2, failed, task, moving(task, data_parallel=2, zero_stage=3), "cast")
    first, second = processes.results(2)
    assert isinstance(second, LaneError)
    assert isinstance(first, RankError)
    assert re.search("rank 1 failed: LaneError: lane cpu in cast .*a broken cable", str(first)), first


def test_layers_must_cast_with_one_scale() -> None:
    task, model = Task("llama", products="fp8"), make_model(Task("llama"))
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    with pytest.raises(BindingError, match=r"fetches model.layers.0.\S+ in fp8 with one scale, but a Float8Linear rea"):
        prepare(task, moving(task), model)


def moving(task: Task, choose: Any = None, **settings: Any) -> Decisions:
    """Return decisions under which weights really move in fp8."""
    decisions = decide(task, choose or uniform("host", "cpu"), fp8_weights=True, **settings)
    assert any(decisions.moves_fp8(unit) for unit in units_of(task, decisions))
    return decisions


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("size", "task", "choose"),
    [
        (3, TASK, uniform("host", "nvme")),
        (2, Task("llama", torch.float32, products="fp8", iterations=2), uniform("host", "stream", "recompute")),
        (2, TASK, mixed),
        (4, Task("llama", optimizer="adamw-bf16-rounded", products="fp8", iterations=2), uniform("host", "cpu")),
        # Shards that are resident are cast at each gather.
        (2, TASK, uniform("gpu", "gpu")),
        (3, Task("llama", torch.float32, products="fp8", iterations=2), uniform("gpu", "stream", "recompute")),
        (4, Task("llama", optimizer="adamw-bf16-rounded", products="fp8", iterations=2), uniform("gpu", "cpu")),
    ],
    ids=str,
)
def test_ranks_agree_on_scales(processes: Any, size: int, task: Task, choose: Any) -> None:
    """Each casts its own part of a weight, with the scale of the whole; shards may begin inside of a weight."""
    decisions = moving(task, choose, data_parallel=size, zero_stage=3)
    expected = processes.call(size, trained_in_memory, task, decisions)
    for (seen, final), (losses, weights) in zip(processes.call(size, trained, task, decisions), expected, strict=True):
        assert seen == losses
        assert not [name for name, weight in weights.items() if final[name].tobytes() != weight.tobytes()]


def test_ranks_without_shards_cast_for_themselves(processes: Any) -> None:
    decisions = moving(TASK, data_parallel=2)
    assert_same_bits(processes.call(2, trained, TASK, decisions), on_ranks(TASK, 2, decisions))
