"""What others measured with engines of which `ullage plan` has a row: ``python benchmarks/published/engines.py``.

Nothing is fitted. A800 are A100 80 GB with slower NVLink, which RoundPipe does not use. Runs of RoundPipe on RTX 4090
sum products in fp16, at a rate that no profile has, so they are left out; so is ZenFlow, whose logs name no machine.
"""

import json
from typing import Any

from benchmarks.origin import origin, write_result
from benchmarks.published.run import HERE, ROOT
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models import resolve_model
from planner.models.parameters import num_parameters
from planner.search import Scorer
from ullage.rivals.best import best_of_engine
from ullage.rivals.lowering import lower

OUTPUT = ROOT / "benchmarks" / "results" / "published_engines.json"


def predicted(run: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction for a run beside what was measured."""
    model = resolve_model(run["model"])
    request = Request(
        model,
        load_profile(run["hardware"]),
        num_devices=run["devices"],
        seq_len=run["seq_len"],
        micro_batch=run["micro_batch"],
        num_micro_batches=run["num_micro_batches"],
        clip=run["engine"] == "megatrain",
    )
    one = variants(request)[0]
    setup = one.setup
    found = best_of_engine(setup, Scorer.of(one, lower=lower), run["engine"])
    tokens = run["devices"] * run["micro_batch"] * run["num_micro_batches"] * run["seq_len"]
    measured = run.get("tokens_per_s") or run["flop_per_s"] / (6 * num_parameters(model))
    return {
        "engine": run["engine"],
        "model": run["model"],
        "hardware": run["hardware"],
        "devices": run["devices"],
        "measured_tokens_per_s": round(measured),
        "predicted_tokens_per_s": round(tokens / found.iteration_s),
        "fits": not found.missing_bytes,
        "source": run["source"],
    }


def main() -> None:
    """Predict every run, and write both."""
    rows = [predicted(run) for run in json.loads((HERE / "engines.json").read_text())["runs"]]
    for row in rows:
        print(json.dumps(row))
    write_result(OUTPUT, {**origin("numpy"), "rows": rows})


if __name__ == "__main__":
    main()
