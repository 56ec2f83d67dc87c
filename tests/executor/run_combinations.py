"""Do processes that share a model train as one does, and send each other what is planned?

    python tests/executor/run_combinations.py                 all combinations, in fp32 and bf16
    python tests/executor/run_combinations.py ring experts    those that have one of these in their name

The processes of each combination of :mod:`rank_combinations` train it, and one process does in memory. Where words
choose, nothing is written. Exits with 1 if a combination is further off than its bound, or sends other bytes than
planned.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks
sys.path.insert(0, str(Path(__file__).parents[1]))  # forked.py
sys.path.insert(0, str(Path(__file__).parent / "optimizer"))  # of training.py

import torch
from rank_combinations import ALONE, BOUNDS, EIGHT, STAGED, Compared, compared
from rank_pool import Processes

from benchmarks.origin import origin, write_result

_OUTPUT: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "many_processes.json"
_TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rows(words: list[str]) -> Iterator[dict[str, Any]]:
    """Run what has one of the words in its name, or all; yield a row for each."""
    for size, table in ((4, STAGED), (8, EIGHT), (8, ALONE)):
        pool = Processes(size)
        pool.wait_until_ready()
        for name, given in table.items():
            for weights, dtype in _TYPES.items():
                if not words or any(word in name for word in words):
                    yield {"name": name, "model": given[0], "weights": weights, **_facts(compared(pool, *given, dtype))}
        pool.close()


def _facts(found: Compared) -> dict[str, Any]:
    decisions = found.decisions
    units = decisions.units.values()
    offloaded = {
        "parameters": any(unit.params != "gpu" for unit in units),
        "activations": any(unit.activations.startswith("offload") for unit in units),
        "state": any(place != "gpu" for unit in units for place in unit.update),
    }
    kinds = ("between stages", "between replicas", "inside layers")
    return {
        "processes": decisions.num_devices,
        "tensor": decisions.tensor_parallel,
        "data": decisions.data_parallel,
        "of them context": decisions.context_parallel,
        "of them expert": decisions.expert_parallel,
        "stages": decisions.pipeline_parallel,
        "rounds": decisions.pipeline_rounds,
        "order": decisions.pipeline_order,
        "ring": decisions.context_exchange == "ring",
        "zero": decisions.zero_stage,
        "offloaded": [what for what, is_so in offloaded.items() if is_so],
        "off": {"losses": found.off_losses, "weights": found.off_weights},
        "sent": dict(zip(kinds, found.sent, strict=True)),
        "planned": dict(zip(kinds, found.planned, strict=True)),
        "same": found.is_same,
    }


def main() -> int:
    """Run combinations; write the result of all."""
    words, result, found = sys.argv[1:], origin("torch", "transformers"), list[dict[str, Any]]()
    for row in rows(words):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        found.append(row)
    if not words:
        write_result(_OUTPUT, result | {"bounds": BOUNDS, "rows": found})
    return 0 if all(row["same"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
