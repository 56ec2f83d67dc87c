"""What others measured with engines of which `ullage plan` has a row: ``python benchmarks/published/engines.py``.

Nothing is fitted. A800 are A100 80 GB with slower NVLink, which RoundPipe does not use. Runs of RoundPipe on RTX 4090
sum products in fp16, at a rate that no profile has, so they are left out; so is ZenFlow, whose logs name no machine.
"""

import json

from benchmarks.origin import origin, write_result
from benchmarks.published.run import HERE, ROOT
from hwprofiles.registry import load_profile
from ullage.rivals.cases import Metric, load_cases
from ullage.rivals.cases.training import TrainingCase

OUTPUT = ROOT / "benchmarks" / "results" / "published_engines.json"


def main() -> None:
    """Predict every run, and write both."""
    rows = []
    for case in load_cases(HERE / "engines.json"):
        assert isinstance(case, TrainingCase)
        found = case.predict(load_profile(case.hardware))
        row = {name: getattr(case, name) for name in ("engine", "model", "hardware", "devices")} | {
            "measured_tokens_per_s": round(case.measured["tokens_per_s"]),
            "predicted_tokens_per_s": round(case.tokens_per_step / found.values[Metric.ITERATION]),
            "fits": found.fits,
            "source": case.source,
        }
        print(json.dumps(row))
        rows.append(row)
    write_result(OUTPUT, {**origin("numpy"), "rows": rows})


if __name__ == "__main__":
    main()
