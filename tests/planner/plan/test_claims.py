"""Claims of the papers that this program builds on, found by simulating and planning: no code states any of it."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models import resolve_model
from planner.optimizers import OPTIMIZERS
from planner.schedule.tasks import Tier
from planner.search import Scorer, search
from ullage.rivals.best import engine_policies
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.lowering import lower

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims_benchmark", BENCHMARKS / "planning" / "claims.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLAIMS = load()
RESULT: dict[str, Any] = json.loads((BENCHMARKS / "results" / "planning_claims.json").read_text(encoding="utf-8"))


def test_thirty_billion_parameters_train_on_one_a100_of_40_gb() -> None:
    """Engines do it only with all parameters on the host, and eight such devices together do not hold it in memory."""
    model, profile = resolve_model("opt-30b"), load_profile("a100-40")
    one = variants(Request(model, profile, micro_batch=8, seq_len=1024))[0]
    setup = one.setup
    scorer = Scorer.of(one, lower=lower)
    best = search(setup, scorer, max_simulations=4)
    ours = scorer.predict(best.decisions)
    assert ours.fits
    streaming = {"megatrain", "roundpipe", "roundpipe-sync", "streaming", "zenflow"}  # layers, or other numerics
    for engine in (engine for name, engine in engine_policies(setup, scorer).items() if name not in streaming):
        on_host = all(engine.decisions.units[unit.name].params == "host" for unit in setup.units if unit.num_params)
        assert bool(engine.missing_bytes) != on_host
        assert engine.missing_bytes or engine.iteration_s > 1.5 * ours.iteration_s
    num_params = sum(unit.num_params for unit in setup.units)
    assert OPTIMIZERS["adamw"].state_bytes_per_param < ours.memory[Tier.HOST].peak_bytes / num_params <= 16.1
    one = variants(Request(model, profile, num_devices=8, micro_batch=8, seq_len=1024))[0]
    eight = one.setup
    eight_scorer = Scorer.of(one, lower=lower)
    assert all(eight_scorer.score(decisions).missing_bytes for decisions in gpu_only(eight))


def test_its_efficiency_reaches_what_elixir_states_as_the_batch_grows() -> None:
    rows = [row for name, row in RESULT["results"].items() if name.startswith("elixir")]
    efficiency = [row["efficiency"] for row in rows]
    assert [row["micro_batch"] for row in rows] == sorted(row["micro_batch"] for row in rows)
    assert sorted(efficiency) == efficiency
    assert efficiency[0] < CLAIMS.ELIXIR_EFFICIENCY < efficiency[-1]
    assert all(row["fits"] for row in rows)


def test_the_best_twin_flow_fraction_is_the_least_that_fits() -> None:
    (row,) = CLAIMS.fraction_sweep("opt-13b", "a100-40", 8, (0.1, 0.2, 0.3, 0.4, 0.6, 0.9))
    assert row["activations"] == "recompute"
    assert 0.1 < row["least_fraction_that_fits"] == row["best_fraction"]
    assert list(row["iteration_s"].values()) == sorted(row["iteration_s"].values())
    sweeps = [row for name, rows in RESULT["results"].items() if name.startswith("twin-flow") for row in rows]
    assert len(sweeps) >= 6
    assert all(row["best_fraction"] == row["least_fraction_that_fits"] for row in sweeps)


@pytest.mark.parametrize(("cpu", "link", "num_slots"), [(0.4, 0.7, 1), (0.8, 1.3, 2), (2.3, 0.6, 1), (2.3, 1.1, 2)])
def test_the_best_stride_is_that_of_the_formula_or_next_to_it(cpu: float, link: float, num_slots: int) -> None:
    row = CLAIMS.stride(cpu, link, num_slots, plans=False)
    assert row["formula_meets_at"] % 1 != 0
    assert abs(row["best_stride"] - row["formula_stride"]) <= 1
    assert row["formula_over_best"] < 1.2


def test_the_best_stride_follows_the_rates() -> None:
    """It grows with the CPU's rate and falls with the link's, over all that were swept; our plan needs none."""
    rows = [row for name, row in RESULT["results"].items() if name.startswith("stride")]
    assert len({row["best_stride"] for row in rows}) >= 4
    for one in rows:
        for other in (row for row in rows if row["num_slots"] == one["num_slots"]):
            if other["cpu_factor"] >= one["cpu_factor"] and other["link_factor"] <= one["link_factor"]:
                assert other["best_stride"] >= one["best_stride"]
    ours = [row["best_stride_over_ours"] for row in rows if "best_stride_over_ours" in row]
    assert len(ours) >= 3
    assert min(ours) >= 1


@pytest.mark.parametrize(("flush", "dominates"), [("blocking", "backward"), ("async", "update")])
@pytest.mark.parametrize("fraction", ["1", "0.5"])
def test_the_phase_that_dominates_is_the_measured_one(flush: str, dominates: str, fraction: str) -> None:
    """Copies of gradients hold up backward; once they do not, the CPU's updates are the wall."""
    name = f"h100x4-20b-l40-tp1-dp4-mb1-gb4-r{fraction}-sg100m-{flush}-flush"
    row = CLAIMS.memory_wall(name, plans=False)
    predicted, measured = row["predicted_shares"], row["measured_shares"]
    for phase, share in predicted.items():
        assert share == pytest.approx(measured[phase], abs=0.05), phase
    assert max(predicted, key=predicted.__getitem__) == max(measured, key=measured.__getitem__) == dominates


def test_our_plan_of_the_same_run_moves_the_wall_back_to_computing() -> None:
    row = RESULT["results"]["memory wall async 1"]
    offloaded, ours = row["engines"]["zero-offload"]["critical_shares"], row["ours"]["critical_shares"]
    assert max(offloaded, key=offloaded.__getitem__) == "cpu"
    assert offloaded["compute"] < 0.2
    assert max(ours, key=ours.__getitem__) == "compute"
    assert ours["compute"] > 0.7
