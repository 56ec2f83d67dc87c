"""The core has no other engine in it: neither in what lowering does, nor in its words."""

import ast
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from cases import decide, small_units, staged

import planner.lowering as package
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import FP32, Decisions, Place, Precision, Sharding
from planner.graph import Unit
from planner.lowering import lower
from planner.lowering.stages import sharing_stages
from planner.models import resolve_model
from planner.placements import mixed
from planner.setup import Mix, Setup

ROOT = Path(__file__).parents[3]
LOWERING = Path(package.__file__).parent


ZERO_BUBBLE = {"pipeline_order": "zero-bubble"}


def schedules() -> Iterator[tuple[tuple[Unit, ...], Decisions]]:
    """Yield models and decisions of ours: each storage, ZeRO stage, degree and type at least once."""
    units, tied, tiles = small_units("demo-llama"), small_units("gpt2"), small_units("demo-llama", num_tiles=2)
    early = {"clip": False, "update_start": "backward", "update_order": "backward", "num_micro_batches": 3}
    for place, params, options in itertools.product(Place, ("gpu", "host"), ({}, early)):
        if params == "gpu" or place is not Place.GPU:
            yield units, decide(units, place, params=params, subgroup_params=1_000_000, **options)
    for stage, place, overlap in itertools.product(range(4), (Place.GPU, Place.CPU), (True, False)):
        options = {"zero_stage": stage, "data_parallel": 2, "num_micro_batches": 2}
        yield tied, decide(tied, place, overlap_next_forward=overlap, **options)
    for spills, count in itertools.product((True, False), (1, 2)):
        options = {"params": "nvme", "spill_gradients": spills, "num_micro_batches": count, "num_gradient_slots": 1}
        yield units, decide(units, Place.NVME, zero_stage=3, data_parallel=2, **options)
    for activations in ("recompute", "offload", "offload-nvme"):
        yield units, decide(units, activations=activations, num_micro_batches=2)
        yield tiles, decide(tiles, activations=activations, num_micro_batches=2, data_parallel=2, zero_stage=1)
    yield tiles, decide(tiles, Place.GPU, params="gpu", num_micro_batches=2)
    yield from of_other_types()
    yield from of_other_models()


def of_other_types() -> Iterator[tuple[tuple[Unit, ...], Decisions]]:
    """Yield decisions with other optimizers, and with weights and state in other types."""
    units, in_fp8 = small_units("demo-llama"), small_units("demo-llama", in_fp8=True)
    bf16 = {"precision": Precision(weights="bf16", master="bf16"), "optimizer": "adamw-bf16"}
    for options in ({"optimizer": "muon"}, {"optimizer": "adamw-8bit"}, bf16, {"precision": FP32}):
        yield units, decide(units, Place.STREAM, subgroup_params=1_000_000, **options)
    yield units, decide(units, Place.CPU, split_masters=True, params="host")
    eight = {"precision": Precision(weights="bf16", products="fp8"), "fp8_weights": True}
    for params in ("gpu", "host"):
        yield in_fp8, decide(in_fp8, params=params, zero_stage=3, data_parallel=2, **eight)


def of_other_models() -> Iterator[tuple[tuple[Unit, ...], Decisions]]:
    """Yield adapters, tensor-parallel shares, pipelines and banks of experts."""
    names = sorted(spec.name for unit in small_units("gpt2") for spec in unit.parameters)
    adapted, share = small_units("gpt2", frozen=frozenset(names[1:])), small_units("demo-llama", tensor_parallel=2)
    yield adapted, decide(adapted, params="host", zero_stage=3, data_parallel=2)
    yield share, decide(share, tensor_parallel=2)
    stages = Setup(small_units("gpt2", 4), Sharding(pipeline_parallel=2, num_micro_batches=3, data_parallel=2))
    yield stages.units, staged(stages, 2, 1)
    split = Setup(
        small_units("gpt2", 4, splits_backward=True, loss_tile_tokens=8), stages.given.model_copy(update=ZERO_BUBBLE)
    )
    yield split.units, staged(split, 2, 1)
    turns = stages.changed(pipeline_rounds=2)
    kept = staged(turns, 2, 1)
    moved = (u.name for u in turns.units if u.can_swap)
    away = {name: kept.units[name].model_copy(update={"activations": "offload"}) for name in moved}
    yield turns.units, kept.model_copy(update={"units": kept.units | away})
    config = resolve_model("mixtral-8x7b").model_copy(update={"num_layers": 2})
    given = {"num_devices": 4, "expert_parallel": 2, "tensor_parallel": 1, "seq_len": 64, "micro_batch": 1}
    setup = variants(Request(config, load_profile("h100"), pipeline_parallel=1, **given))[0].setup
    yield setup.units, mixed(setup, Mix(4, 2, 1, num_host=2, zero_stage=3))


def statements(path: Path) -> set[int]:
    """Return the first lines of the statements inside a file's functions, but for docstrings."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    inside = (each for function in functions for node in function.body for each in ast.walk(node))
    found = (each for each in inside if isinstance(each, ast.stmt) and not isinstance(each, ast.FunctionDef))
    return {each.lineno for each in found if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))}


def traced() -> dict[str, set[int]]:
    """Lower everything, as prepare does, and return the lines of each file that ran."""
    ran: dict[str, set[int]] = defaultdict(set)
    ours: dict[CodeType, bool] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_filename.startswith(str(LOWERING))
        if not ours[code]:
            return None
        if event == "line":
            ran[code.co_filename].add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for units, decisions in schedules():
            sharing_stages(units, decisions)
            lower(units, decisions, asynchronous=True, takes_snapshots=decisions.pipeline_parallel == 1).tasks  # noqa: B018
            lower(units, decisions, asynchronous=False)
    finally:
        sys.settrace(before)
    return ran


def test_schedules_of_ours_run_nearly_all_of_lowering() -> None:
    ran = traced()
    missing = {
        f"{path.name}:{line}" for path in LOWERING.glob("*.py") for line in statements(path) - ran.get(str(path), set())
    }
    total = sum(len(statements(path)) for path in LOWERING.glob("*.py"))
    assert len(missing) <= 0.05 * total, sorted(missing)


WORDS = re.compile(
    r"deepspeed|zero.?offload|zero.?infinity|\bfsdp2?\b|zenflow|megatrain|roundpipe|shadowspill|\bratel\b|lohan|super.?offload"
    r"|twin.?flow|deep.optimizer.states|megatron|checkfreq|torchsnapshot|datastates",
    re.IGNORECASE,
)


@pytest.mark.parametrize("package", ["planner", "executor"])
def test_other_engines_are_named_in_comments_only(package: str) -> None:
    """A docstring may say where an idea is from; code may not depend on who else has it."""
    named = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(tree := ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
                node.value.value = ""
        if found := WORDS.search(ast.unparse(tree)):
            named.append(f"{path.relative_to(ROOT)}: {found[0]}")
    assert not named
