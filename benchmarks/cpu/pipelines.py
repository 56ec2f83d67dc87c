"""How long pipelines take that two processes run, beside what is predicted.

    python benchmarks/cpu/pipelines.py [SUBSTRING]

Two processes of one core each train a small Llama in fp32, as two devices with little memory: as data-parallel ranks,
which exchange weights and gradients through shared memory or over gloo, as ranks that share sequences, in two stages,
and in rounds. The machine is calibrated first (``ullage calibrate``), and before each run again, both devices at once
and what the processes take to exchange data: a machine that others use too changes its speed by a tenth within minutes.
Nothing is fitted to a run. Every run is started as ``torchrun`` starts it. It takes 25 minutes. With a substring, only
ways whose name has it run again, and the others keep their rows, which say when they ran.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.origin import origin, write_result
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.models import resolve_model
from planner.plan.planning import make_plan

NUM_LAYERS: Final = 8
BATCH: Final = {"seq_len": 256, "micro_batch": 2, "num_micro_batches": 4}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "in data-parallel ranks": {"num_micro_batches": 2, "collectives": "host"},
    "in data-parallel ranks, over gloo": {"num_micro_batches": 2, "collectives": "fabric"},
    "sharing sequences, all-to-all": {"context_parallel": 2, "context_exchange": "all-to-all"},
    "sharing sequences, in a ring": {"context_parallel": 2, "context_exchange": "ring"},
    "in two stages": {"pipeline_parallel": 2, "pipeline_order": "1f1b"},
    "in two stages, zero bubble": {"pipeline_parallel": 2, "pipeline_order": "zero-bubble"},
    "in two stages, in 2 rounds": {"pipeline_parallel": 2, "pipeline_rounds": 2},
    "in two stages, in 4 rounds": {"pipeline_parallel": 2, "pipeline_rounds": 4},
}
DEVICE_BYTES: Final = 130_000_000
MORE_BYTES: Final = {"in two stages, zero bubble": 190_000_000}  # what its gradients wait with
_ITERATIONS: Final = 16
_RESULT: Final = Path(__file__).parents[1] / "results" / "cpu_pipelines.json"


def main() -> None:
    """Run all ways and write the result."""
    result, wanted = origin("torch", "numpy"), sys.argv[1] if len(sys.argv) > 1 else ""
    rows = {row["way"]: row for row in json.loads(_RESULT.read_text())["rows"]}
    model = resolve_model("demo-llama").model_copy(update={"num_layers": NUM_LAYERS})
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / "two-cores.json"
        subprocess.run([sys.executable, "-m", "ullage", "calibrate", "--output", str(machine)], check=True)
        for name, degrees in WAYS.items():
            if wanted not in name:
                continue
            device = _two_devices(machine).with_device_memory(MORE_BYTES.get(name, DEVICE_BYTES))
            plan = make_plan(Request(model, device, num_devices=2, precision=FP32, **BATCH | degrees))
            path = Path(tempfile.mkdtemp(dir=folder)) / "plan.json"
            path.write_text(plan.to_json(), encoding="utf-8")
            phases = _run(path)["phases"]
            row = rows[name] = {
                "way": name,
                "date": result["date"],
                "plan": str(plan),
                **{phase: phases[phase] for phase in ("forward", "backward", "iteration")},
            }
            print(json.dumps(row), flush=True)
    result["command"] = "python benchmarks/cpu/pipelines.py"
    write_result(_RESULT, result | {"rows": [rows[name] for name in WAYS if name in rows]})


def _two_devices(machine: Path) -> HardwareProfile:
    """Calibrate two devices of one core each, beside what is known of the machine."""
    _in_two_processes("calibrate", "--only", "device,fabric", "--output", str(machine))
    return load_profile(str(machine))


def _run(plan: Path) -> dict[str, Any]:
    """Execute a plan in two processes; return what the first one prints."""
    output, count = str(plan.parent / "out"), str(_ITERATIONS)
    words = ("execute", str(plan), "--output-dir", output, "--iterations", count, "--json", "--allow-other-machine")
    found: dict[str, Any] = json.loads(_in_two_processes(*words))
    return found


def _in_two_processes(*words: str) -> str:
    """Run a command of ``ullage`` in two processes; return what the first one prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        variables = os.environ | {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "ullage", *words]
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a process has failed; its own error says why")
    return printed[0]


if __name__ == "__main__":
    main()
