"""What our planner would reach where a streaming engine was measured: ``python benchmarks/published/streamed.py``.

Same model, kernels, budget of device memory, bf16 state and tokens per step. Nobody has run our plans, so this is a
prediction beside a measurement. Our planner also chooses how many tokens pass at a time.
"""

import dataclasses
import json
from typing import Any

from rich.progress import track

from benchmarks.origin import origin, write_result
from benchmarks.published.run import HERE, ROOT
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.search import Candidate, Scorer, best_of, no_garbage_collection, search
from ullage.rivals.cases import Metric, load_cases
from ullage.rivals.cases.training import TrainingCase

OUTPUT = ROOT / "benchmarks" / "results" / "streamed.json"
# One sequence length and one optimizer: the others differ in computing only.
PATTERN = "-adamw-s4096-"
TOKENS_PER_ROUND = (4096, 8192, 16384, 32768)


@no_garbage_collection()
def ours(case: TrainingCase, machine: HardwareProfile) -> tuple[int, Candidate]:
    """Return the tokens per round that our planner would choose, and the best candidate."""
    found: list[tuple[int, Candidate]] = []
    for num_tokens in TOKENS_PER_ROUND:
        sizes = {"micro_batch": num_tokens // case.seq_len, "num_micro_batches": case.tokens_per_step // num_tokens}
        setup = case.model_copy(update=sizes).setup(machine)
        setup = dataclasses.replace(setup, storage="activations")
        cost = CostModel(machine, setup.units, setup.given)
        candidate = search(setup, Scorer(setup.units, case.seq_len, cost), 200)
        found.append((num_tokens, candidate))
    best = best_of(candidate for _, candidate in found)
    return next((num_tokens, candidate) for num_tokens, candidate in found if candidate is best)


def main() -> None:
    """Predict every such run and ours beside it, and write both."""
    rows: dict[str, Any] = {}
    cases = [case for case in load_cases(HERE / "streamed_h100.json") if PATTERN in case.id]
    for case in track(cases, description="runs"):
        assert isinstance(case, TrainingCase)
        profile = load_profile(case.hardware)
        machine = case.machine_of(profile)
        num_tokens, best = ours(case, machine)
        predicted_s = case.predict(profile).values[Metric.ITERATION]
        rows[case.id] = {
            "budget_gib": case.device_budget_gib,
            "tokens_per_step": case.tokens_per_step,
            "measured_tokens_per_s": case.measured["tokens_per_s"],
            "predicted_tokens_per_s": round(case.tokens_per_step / predicted_s),
            "ours_tokens_per_s": None if best.missing_bytes else round(case.tokens_per_step / best.iteration_s),
            "ours_tokens_per_round": num_tokens,
        }
        print(json.dumps(rows[case.id]))
    write_result(OUTPUT, {**origin("highspy", "numpy"), "rows": rows})


if __name__ == "__main__":
    main()
