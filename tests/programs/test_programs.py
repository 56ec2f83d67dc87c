"""Programs train as in memory: some in ``make test``, all in ``make test-all``, with much memory and with little."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_programs
from amount import ALL
from program_catalogue import IN_MEMORY, Program, programs
from run_programs import CPU, on_ranks, outcome, trained

# fmt: off
TRIED = {
    "loops": ("r_drop", "critic_with_a_penalty"),
    "edits": (
        "hooks_on_accumulated_gradients", "weights_between_modules", "determinant_of_a_weight",
        "determinant_in_later_steps", "planned_curvature", "planned_inner_steps", "layers_dropped_at_random",
        "linearized_in_weights", "weights_made_again", "penalty_on_gradients", "forwards_replaced_later",
        "blocks_inside_blocks", "blocks_inside_blocks_later",
        "autocast_around_forward", "gradients_of_zero_in_dropped_blocks", "distillation_in_a_planned_step",
    ),
    "state": (
        "inputs_that_advance", "cache_under_another_name", "codebook_in_a_frozen_parameter",
        "counts_in_many_places", "hooks_added_later", "counting_hooks_on_gradients",
    ),
    "modules": ("pruned", "parts_that_do_not_run", "compiled_methods", "modules_lent_to_blocks"),
    "models": ("mixtral", "cache_of_states"),
    "operators": ("outputs_that_nothing_uses", "weights_that_forward_makes", "sizes_drawn_in_a_planned_step"),
    "adapters": ("adalora", "context_prompt_tuning"),
    "trainers": ("cross_encoder_with_cached_gradients",),
    "optimizers": (
        "own_class", "projected_in_some_cases", "two_optimizers", "rates_that_depend_on_the_loss",
    ),
}
"""An eighth of all, chosen for the lines that each adds to those that others reach, and for deliberate defects."""
FOLLOW = {
    "planned_penalty", "planned_derivatives", "planned_curvature", "planned_inner_steps", "planned_directions",
    "layers_dropped_at_random", "sizes_drawn_in_a_planned_step", "blocks_inside_blocks",
}
"""Programs of these that do in each step what their plan has."""
# fmt: on
REFUSED = ("scripted_part",)
ON_RANKS = {
    "linearized_in_weights": "",
    "weights_between_modules": "",
    "blocks_inside_blocks_later": "",
    "momentum_encoder": "",
    "adalora": "",
    "codebook_in_a_frozen_parameter": "",
    "embeddings_of_bounded_norm": "forward writes to the parameter",
}
"""Programs that two ranks try in ``make test``. Those that ranks refuse have the words of it."""
REFUSED_ON_RANKS = {
    "bounded_by_other_data": "forward writes to the parameter",
    "context_prompt_tuning": "forward writes to the parameter",
    "scripted_part": "is scripted",
    "parameters_of_the_loss": "whose gradients ranks would not add up",
    "penalty_on_gradients": "its grad is a mean over ranks, which has none; use torch.autograd.grad",
    "curvature_from_gradients": "its grad is a mean over ranks, which has none; use torch.autograd.grad",
    "hooks_on_accumulated_gradients": "use register_hook, or one backward for each step",
}


@pytest.mark.parametrize(
    "program", [p for p in programs() if ALL or p.name in TRIED.get(p.kind, ())], ids=lambda p: p.name
)
def test_programs_train_as_in_memory(program: Program) -> None:
    expected = trained(program, IN_MEMORY)
    for tight in (False, True) if ALL else (program.kind in ("edits", "state"),):
        found = outcome(program, expected, tight=tight)
        assert (bool(found.refused), found.failed) == (program.name in REFUSED, "")
        assert found.refused or (found.off is not None and found.off <= CPU.bound)
        assert not (found.num_left and program.name in FOLLOW)


@pytest.mark.parametrize(
    "program",
    [p for p in programs() if p.name in ON_RANKS or (ALL and p.kind != "trainers")],  # which read their batches apart
    ids=lambda p: p.name,
)
def test_programs_train_on_two_ranks_as_in_memory(processes: Any, program: Program) -> None:
    """With the same batches on both, gradients are those of one process."""
    expected = trained(program, IN_MEMORY)
    outcomes = processes.call(2, on_ranks, program.kind, program.name, expected)
    if words := (ON_RANKS | REFUSED_ON_RANKS).get(program.name):
        assert any(words in found.refused + found.failed for found in outcomes)
    else:
        assert not any(found.refused + found.failed for found in outcomes)
        assert max(found.off for found in outcomes) <= CPU.bound


def test_what_there_is_is_kept_when_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows(*_: object) -> Iterator[dict[str, Any]]:
        yield {"kind": "loops", "name": "first", "absent": "why"}
        os.kill(os.getpid(), signal.SIGTERM)
        yield {"kind": "loops", "name": "second", "absent": "why"}

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run_programs, "rows_of", rows)
    monkeypatch.setattr(sys, "argv", ["run_programs.py", "r_drop", "--output", str(tmp_path / "found.json")])
    try:
        with pytest.raises(SystemExit, match="143"):
            run_programs.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [row["name"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]] == ["first"]
