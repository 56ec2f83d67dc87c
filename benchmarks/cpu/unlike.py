"""How long two devices of unlike speed take, with shares of each micro-batch by their speed and with equal ones.

    python benchmarks/cpu/unlike.py

Two processes of one core each train a small Llama in fp32. Another process computes on the first core all the time, so
that this device has about half the speed. Each device is calibrated as it is (``ullage calibrate``). Nothing is fitted
to a run. Every run is started as ``torchrun`` starts it.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.cpu.pipelines import in_two_processes, run, two_devices
from benchmarks.origin import origin, write_result
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.plan.unlike import make_unlike_plan

_LAYERS: Final = 8
_NUM_MICRO_BATCHES: Final = 2
_SEQUENCES: Final = 12  # of all devices, in a micro-batch
_RESULT: Final = Path(__file__).parents[1] / "results" / "cpu_unlike.json"


def main() -> None:
    """Run both and write the result."""
    model = resolve_model("demo-llama").model_copy(update={"num_layers": _LAYERS})
    fast = two_devices().model_copy(update={"name": "core"})
    rows = list[dict[str, Any]]()
    with _busy(core=min(os.sched_getaffinity(0))), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slow.json"
        path.write_text(fast.model_dump_json(exclude_none=True))
        in_two_processes("calibrate", "--only", "device,fabric", "--output", str(path))
        slow = load_profile(str(path)).model_copy(update={"name": "half-core"})
        common: dict[str, Any] = {"num_devices": 2, "seq_len": 256, "num_micro_batches": _NUM_MICRO_BATCHES}
        divided = Request(model, slow, precision=FP32, global_batch=_SEQUENCES * _NUM_MICRO_BATCHES, **common)
        plans = {
            "shares by speed": make_unlike_plan(divided, [(slow, 1), (fast, 1)]),
            "equal shares": make_plan(Request(model, slow, precision=FP32, micro_batch=_SEQUENCES // 2, **common)),
        }
        for name, plan in plans.items():
            row = {"way": name, "plan": str(plan), "shares": _shares(plan), "iteration": _timed(plan)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    write_result(_RESULT, origin("torch", "numpy") | {"rows": rows})


def _shares(plan: Plan) -> list[int]:
    return [*(plan.decisions.shares or (plan.decisions.micro_batch,) * 2)]


def _timed(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(plan.to_json(), encoding="utf-8")
        found: dict[str, Any] = run(path)["phases"]["iteration"]
        return found


@contextlib.contextmanager
def _busy(core: int) -> Iterator[None]:
    """Compute on a core all the time, in another process."""
    words = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", words])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
