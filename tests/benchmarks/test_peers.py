"""The benchmark of peers: it runs from end to end, and a row that trains otherwise counts for nothing."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.peers import MODELS, SHAPES, cell_of, chosen
from benchmarks.peers import driver
from benchmarks.peers.build import compiled
from benchmarks.peers.driver import Comparison, Settings, table
from benchmarks.peers.host_memory import host_bytes, too_large
from benchmarks.peers.jobs import Cell, Job, Outcome, model_config
from benchmarks.peers.processes import Clock, Runner
from benchmarks.peers.rows import ROWS, Row, rows_for
from benchmarks.peers.summary import IN_MEMORY, TOLERANCES, Reference, cell_summary, paired_ratio, verdict
from benchmarks.peers.worker import run
from benchmarks.peers.zero import configuration
from hwprofiles.registry import load_profile
from planner.models.parameters import parameters

ROOT = Path(__file__).parents[2]
CELL = Cell("llama-tiny", "fp32", 2, 32, 2, 1.0, None, 1)
OURS, PEER, CEILING = (
    Row("ours", "ours", "ours"),
    Row("peer", "zero2"),
    Row("memory", "in_memory", "ceiling"),
)
REFERENCE = Reference(IN_MEMORY, (3.0, 2.0))
IN_CELL = {"nearest": REFERENCE}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.part(0)
def test_command_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "peers.json"
    command = [sys.executable, "benchmarks/cpu/peers.py", "--tiny", "--profile", "epyc-turin-2c", "--rows", "ours"]
    subprocess.run([*command, "in-memory", "--output", str(output)], cwd=ROOT, check=True, capture_output=True)
    result = json.loads(output.read_text())
    assert {"command", "date", "cpu", "num_cores", "versions", "load_average_before", "num_timed"} <= result.keys()
    (cell,) = result["cells"].values()
    assert {name: row["status"] for name, row in cell["rows"].items()} == {"ours": "ok", "in-memory": "ok"}
    for row in cell["rows"].values():
        assert row["tokens_per_s"] == pytest.approx(cell["num_tokens"] / row["iteration_s"])
        assert row["loss_error"] < TOLERANCES["fp32"] / 10
        assert row["peak_rss_bytes"] > 0
        assert row["start_up_s"] > 0
        assert row["mfu"] == pytest.approx(cell["model_flop_per_token"] * row["tokens_per_s"] / cell["peak_flop_per_s"])
        assert 0 < row["mfu"] < 1
    assert 0 < cell["rows"]["ours"]["device_span_share"] <= 1
    assert cell["rows"]["in-memory"]["device_span_share"] is None
    assert cell["reference"] == IN_MEMORY
    assert result["not_begun"] == []
    assert cell["plan"]["updated_params"].get("cpu", 0) > 0  # the device is too small for the optimizer
    assert all(cell[key] > 0 for key in ("ours_over_in_memory", "ours_over_bound", "replayed_over_measured"))
    assert abs(cell["memory_errors"]["gpu"]) < 0.05
    assert cell["memory_errors"]["host"] == 0
    assert "ours_over_best_peer" not in cell  # nobody was there


@pytest.mark.parametrize(
    ("there", "ready"),
    [
        ("deepspeed/ops/adam/cpu_adam_op.cpython-312-x86_64-linux-gnu.so", True),  # in a wheel that was built with it
        ("extensions/cpu_adam/cpu_adam.so", True),  # by an earlier run
        ("deepspeed/ops/adam/cpu_adam.py", False),
    ],
)
def test_what_is_compiled_is_not_compiled_again(there, ready, tmp_path):
    path = tmp_path / there
    path.parent.mkdir(parents=True)
    path.touch()
    assert compiled(tmp_path) == ready


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("lr_factor", "status"), [(1.0, "ok"), (1.1, "failed"), (0.9, "failed")])
def test_gate_sees_a_wrong_learning_rate(lr_factor: float, status: str) -> None:
    job = Job(CELL, "in_memory", {"fused": False}, num_warm_up=2, num_timed=4)
    reference = run(job)
    other = run(dataclasses.replace(job, settings={"lr_factor": lr_factor}))
    assert verdict([other], (Reference(IN_MEMORY, reference.losses),), CELL)[0] == status


def outcome(iteration_s: float, loss: float = 2.0) -> Outcome:
    return Outcome(losses=(3.0, loss), iteration_s=(iteration_s, iteration_s), total_s=2 * iteration_s)


def test_what_fails_the_gate_is_no_best_peer() -> None:
    rows = (OURS, PEER, dataclasses.replace(PEER, name="other"), CEILING)
    outcomes = {"ours": [outcome(2)], "peer": [outcome(1, loss=2.1)], "other": [outcome(3)], "memory": [outcome(1)]}
    summary = cell_summary(CELL, rows, outcomes, IN_CELL)
    assert summary["reference"] == IN_MEMORY
    assert summary["rows"]["ours"]["checked_against"] == [IN_MEMORY]
    assert summary["rows"]["peer"]["status"] == "failed"
    assert summary["best_peer"] == "other"
    assert summary["ours_over_best_peer"] == pytest.approx(1.5)
    assert summary["ours_over_in_memory"] == pytest.approx(0.5)
    outcomes["ours"] = [outcome(2, loss=2.1)]
    assert "ours_over_best_peer" not in cell_summary(CELL, rows, outcomes, IN_CELL)


@pytest.mark.parametrize(
    ("losses", "statuses"),
    [
        # of ours, of two rows of DeepSpeed, of FSDP2
        ((2.0, 2.0, 2.0, 2.0), ("ok", "ok", "ok", "ok")),
        ((2.1, 2.0, 2.0, 2.0), ("failed", "ok", "ok", "ok")),
        ((2.0, 2.1, 2.1, 2.0), ("ok", "failed", "failed", "ok")),  # rows of one package are no company
        ((2.0, 2.1, 2.0, None), ("ok", "failed", "ok", "error")),
        ((2.1, 2.0, None, None), ("failed", "failed", "error", "error")),  # who is wrong is not known
        ((2.0, None, None, None), ("not checked", "error", "error", "error")),
        ((None, 2.0, 2.0, None), ("error", "not checked", "not checked", "error")),
    ],
)
def test_without_a_reference_engines_are_held_to_one_another(
    losses: tuple[float | None, ...], statuses: tuple[str, ...]
) -> None:
    rows = (OURS, PEER, dataclasses.replace(PEER, name="other", engine="zero3"), Row("third", "fsdp2"))
    ran = {
        row.name: [outcome(2, loss)] if loss else [Outcome(error="OutOfMemoryError")]
        for row, loss in zip(rows, losses, strict=True)
    }
    summary = cell_summary(CELL, rows, ran, {})
    assert tuple(summary["rows"][row.name]["status"] for row in rows) == statuses
    assert summary["reference"] == "other engines"
    assert ("best_peer" in summary) == (statuses[0] == "ok")
    if statuses[0] == "ok":
        assert IN_MEMORY not in summary["rows"]["ours"]["checked_against"]
        assert summary["rows"]["ours"]["checked_against"]


def test_stochastic_rounding_is_held_to_its_own_kind() -> None:
    cell = dataclasses.replace(CELL, dtype="bf16", state="bf16")
    rows = (OURS, PEER, dataclasses.replace(PEER, name="third", engine="fsdp2"), CEILING)
    ran = {OURS.name: [outcome(2, 2.2)], PEER.name: [outcome(3)], "third": [outcome(4)], CEILING.name: [outcome(1)]}
    nearest, stochastic = REFERENCE, Reference(IN_MEMORY, (3.0, 2.2))
    summary = cell_summary(cell, rows, ran, {"nearest": nearest, "stochastic": stochastic})
    assert {row["status"] for row in summary["rows"].values()} == {"ok"}
    assert summary["ours_over_best_peer"] == pytest.approx(1.5)
    assert "state bf16/bf16/bf16" in table({"cell": summary}, [row.name for row in rows])
    alone = cell_summary(cell, rows[:3], ran, {})
    assert [row["status"] for row in alone["rows"].values()] == ["not checked", "ok", "ok"]  # peers are no witnesses
    swapped = cell_summary(cell, rows, ran, {"nearest": stochastic, "stochastic": nearest})
    assert {row["status"] for row in swapped["rows"].values()} == {"failed"}


@pytest.mark.parametrize(("dtype", "state"), [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_every_row_states_what_it_keeps(dtype: str, state: str) -> None:
    cell = dataclasses.replace(CELL, dtype=dtype, max_norm=1.0, state=state)
    states = {row.name: row.state(cell) for row in ROWS if state in row.states}
    assert {"ours", "in-memory", "fsdp2", "torchao", "zero-3-params"} <= states.keys()
    assert ("twin-flow" in states) == (state == "fp32")
    assert all(found["clipping"] for found in states.values())
    assert {(found["master"], found["moments"]) for found in states.values()} == {(state, state)}
    assert states["ours"]["gradients"] == dtype
    assert states["fsdp2"]["gradients"] == state


@pytest.mark.usefixtures("threads")
def test_weights_that_are_master_copies_are_trained_alike(tmp_path: Path) -> None:
    """Ours is what plain training with the same rounding is, and DeepSpeed is told to keep nothing else."""
    cell = dataclasses.replace(CELL, dtype="bf16", state="bf16")
    rows = (dataclasses.replace(OURS, states=("bf16",)), dataclasses.replace(CEILING, states=("bf16",)))
    settings = Settings((cell,), rows, "cpu", {1: load_profile("epyc-turin-2c")}, 1, 2, 4, True, tmp_path / "out.json")
    result = Comparison(settings, Here(), tmp_path).run()  # type: ignore[arg-type]
    (found,) = result["cells"].values()
    assert {name: row["status"] for name, row in found["rows"].items()} == {"ours": "ok", "memory": "ok"}
    assert found["rows"]["ours"]["loss_error"] < TOLERANCES["bf16"] / 10
    bf16 = configuration(Job(cell, "zero2"))["bf16"]
    assert bf16 == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert set(configuration(Job(dataclasses.replace(cell, state="fp32"), "zero2"))["bf16"].values()) == {True, False}


def test_other_mathematics_is_no_witness() -> None:
    zen = Row("zen", "zenflow", "other mathematics")
    summary = cell_summary(CELL, (OURS, zen), {"ours": [outcome(1)], "zen": [outcome(1)]}, {})
    assert summary["rows"]["ours"]["status"] == "not checked"


class Machine:
    """Stands for a machine: what every engine's process finds is given."""

    num_cores, peers = 1, None

    def __init__(self, found: dict[str, Outcome], clock: Clock | None = None) -> None:
        self.found, self.jobs = found, list[Job]()
        self.clock = clock or Clock(600.0)

    def run(self, job: Job, _limit_s: float | None = None) -> Outcome:
        self.jobs.append(job)
        return self.found[job.engine]


def compared(
    folder: Path,
    machine: Machine,
    rows: tuple[Row, ...],
    device: str = "cpu",
    cells: tuple[Cell, ...] = (CELL,),
    num_rounds: int = 1,
) -> dict[str, Any]:
    profiles = {cell.compute_threads: load_profile("epyc-turin-2c") for cell in cells}
    settings = Settings(cells, rows, device, profiles, num_rounds, 1, 1, 1, folder / "peers.json")
    return Comparison(settings, machine, folder).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("large", [False, True])
def test_a_cell_too_large_for_memory_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, large: bool
) -> None:
    monkeypatch.setattr(driver, "origin", lambda *_, **__: {"gpu_bytes": 1000 if large else 80e9})
    out = Outcome(error="OutOfMemoryError: CUDA out of memory")
    machine = Machine({"ours": outcome(1), "fsdp2": outcome(3), "in_memory": out})
    result = compared(tmp_path, machine, (OURS, CEILING, Row("fsdp2", "fsdp2")), "cuda")
    (cell,) = result["cells"].values()
    assert {name: row["status"] for name, row in cell["rows"].items()} == {
        "ours": "ok",
        "fsdp2": "ok",
        "memory": "error",
    }
    assert cell["ours_over_best_peer"] == pytest.approx(3)
    assert cell["rows"]["ours"]["checked_against"] == ["fsdp2"]
    (why,) = result["notes"]["references"].values()
    assert cell["rows"]["memory"]["why"] == why
    assert why.startswith("not tried: weights, gradients and moments take 0.0 GB" if large else "OutOfMemory")
    assert sum(job.engine == "in_memory" for job in machine.jobs) == (0 if large else 1)
    assert "held to those of other engines" in table(result["cells"], ["ours"])


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_of_one_round_the_reference_is_the_ceiling_too(tmp_path: Path, num_rounds: int) -> None:
    machine = Machine({"ours": outcome(1), "in_memory": outcome(2)})
    result = compared(tmp_path, machine, (OURS, CEILING), num_rounds=num_rounds)
    (cell,) = result["cells"].values()
    assert cell["rows"]["memory"]["status"] == "ok"
    # More rounds take turns, and the reference is then the stock loop over parameters.
    fused = [job.settings.get("fused", "itself") for job in machine.jobs if job.engine == "in_memory"]
    assert fused == ([True] if num_rounds == 1 else [False, "itself", "itself"])


# Of Llama-2-7B, 6.74e9 parameters, with fp32 state: bytes per parameter, but for what PyTorch rounds up.
@pytest.mark.parametrize(
    ("engine", "settings", "state", "per_param", "fits"),
    [
        ("zero2", {}, "fp32", 18, True),
        ("zero3", {}, "fp32", 18, True),
        ("zero3", {"offload_param": True}, "fp32", 20, False),
        ("zero3", {"ratio": 0.5}, "fp32", 10, True),
        ("zero3", {}, "bf16", 10, True),
        ("ours", {}, "fp32", 0, True),  # its plan knows
        ("in_memory", {}, "fp32", 0, True),
    ],
)
def test_what_a_peer_keeps_on_the_host_is_known_before_it_is_started(
    tmp_path: Path, engine: str, settings: dict[str, Any], state: Any, per_param: float, fits: bool
) -> None:
    job = Job(Cell("llama-2-7b", "bf16", state=state), engine, settings, device="cuda")
    assert host_bytes(job) == pytest.approx(per_param * 6_738_415_616)
    assert (too_large(job, 128 << 30) is None) == fits
    assert too_large(dataclasses.replace(job, device="cpu"), 1) is None
    machine = Machine({"zero3": outcome(1)})
    comparison = Comparison(
        Settings((job.cell,), (), "cpu", {0: load_profile("h100")}, 1, 1, 1, 1, tmp_path / "peers.json"),
        machine,
        tmp_path,
    )
    comparison._memory_bytes = 128 << 30
    assert len(machine.jobs) == 0
    if not fits:
        error = comparison._run(job).error
        assert error is not None
        assert error.startswith("not tried: what it keeps takes 134.8 GB of host memory, and of this host's 137.4 GB")
        assert not machine.jobs


def test_rounding_up_is_counted_where_it_is_not_avoided() -> None:
    job = Job(Cell("llama-tiny"), "torchao", device="cuda")
    sizes = [spec.num_params for spec in parameters(model_config("llama-tiny"))]
    assert host_bytes(job) == sum(8 * n + 2 * 2 ** math.ceil(math.log2(4 * n)) for n in sizes)
    assert host_bytes(dataclasses.replace(job, engine="fsdp2")) == host_bytes(job) + sum(
        4 * n - 2 ** math.ceil(math.log2(4 * n)) for n in sizes
    )


class Here(Machine):
    """Runs engines in this process."""

    def __init__(self) -> None:
        super().__init__({})

    def run(self, job: Job, _limit_s: float | None = None) -> Outcome:
        return run(job)


class Ticks:
    """A clock on which every process takes a second."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s


class SlowMachine(Machine):
    def run(self, job: Job, limit_s: float | None = None) -> Outcome:
        self.clock.left_s -= 1  # type: ignore[misc]
        return super().run(job, limit_s)


def test_cells_that_matter_most_are_whole_before_others_begin(tmp_path: Path) -> None:
    cells = tuple(dataclasses.replace(CELL, num_micro_batches=n) for n in (1, 2, 3))
    rows = (OURS, Row("fsdp2", "fsdp2"))
    found = {name: outcome(2) for name in ("ours", "fsdp2", "in_memory")}
    machine = SlowMachine(found, Ticks(5))  # type: ignore[arg-type]
    result = compared(tmp_path, machine, rows, cells=cells)
    assert [(job.cell, job.engine) for job in machine.jobs] == [
        *[(cells[0], name) for name in ("in_memory", "ours", "fsdp2")],
        *[(cells[1], name) for name in ("in_memory", "ours")],
    ]
    statuses = [[row["status"] for row in cell["rows"].values()] for cell in result["cells"].values()]
    assert statuses == [["ok", "ok"], ["ok", "not run"], ["not run", "not run"]]
    assert result["not_begun"] == [cells[2].name]
    assert list(result["notes"]["planning_s"]) == [cell.name for cell in cells[:2]]
    assert result["cells"][cells[2].name]["reference"] is None
    assert f"{cells[2].name}: not run, no time was left" in table(result["cells"], ["ours", "fsdp2"]).splitlines()


def test_grid_of_a_gpu() -> None:
    cells = [cell_of(*names, None, 0) for names in chosen(None, None)]
    assert len({cell.name for cell in cells}) == len(cells) == len(MODELS) * len(SHAPES)
    batches = {(cell.micro_batch, cell.seq_len, cell.num_micro_batches) for cell in cells}
    assert {(1, 2048, 1), (4, 2048, 1), (8, 2048, 1), (2, 4096, 1), (1, 2048, 8)} <= batches
    assert {cell.max_norm for cell in cells} == {0.0, 1.0}
    # First what has to be beaten, then what has to be matched, then what others cannot do, with all of the device.
    assert [(cell.model, cell.num_tokens, cell.max_norm) for cell in cells[:4]] == [
        ("llama-3.2-3b", 8192, 0.0),
        ("llama-2-7b", 8192, 0.0),
        ("llama-3.2-3b", 65536, 0.0),
        ("llama-2-7b", 8192, 1.0),
    ]
    assert {cell.model for cell in cells if cell.device_memory_bytes is None} == {"llama-2-13b"}
    assert cell_of("llama-2-13b", "small", 30, 0).device_memory_bytes == 30
    assert chosen(["a", "b"], ["small", "long"]) == (("a", "small"), ("a", "long"), ("b", "small"), ("b", "long"))
    assert chosen(None, ["small"]) == tuple((model, "small") for model in MODELS)


def test_a_peer_has_its_parameters_on_the_host() -> None:
    """Else it stops where parameters leave the device no room, and not where it has to."""
    found = {row.name: row.candidates("cuda", recompute=False, most=1)[0] for row in rows_for("cuda")}
    assert any(settings.get("offload_param") for settings in found.values())
    zero = configuration(Job(CELL, "zero3", found["zero-3-params"], device="cuda"))["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert not any(key.endswith("persistence_threshold") for key in zero)  # nothing has to stay on the device


def test_ratios_are_paired_by_round() -> None:
    disturbed = [outcome(1), outcome(10), outcome(1)], [outcome(2), outcome(20), outcome(2)]
    assert paired_ratio(disturbed[1], disturbed[0]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("outcomes", "references", "status"),
    [
        ([], (REFERENCE,), "not run"),
        ([Outcome(error="ModuleNotFoundError: No module named 'deepspeed'")], (REFERENCE,), "not installed"),
        ([outcome(1), Outcome(error="OutOfMemoryError: CUDA")], (REFERENCE,), "error"),
        ([outcome(1)], (), "not checked"),
        ([outcome(1, loss=float("nan"))], (REFERENCE,), "failed"),
        ([outcome(1)], (REFERENCE,), "ok"),
    ],
)
def test_statuses(outcomes: list[Outcome], references: tuple[Reference, ...], status: str) -> None:
    assert verdict(outcomes, references, CELL)[0] == status


def test_a_process_that_takes_too_long_is_an_outcome() -> None:
    runner = Runner(1, None, 60.0, Clock(60.0))
    assert runner.run(Job(CELL, "in_memory"), limit_s=0.2).error == "took more than 0 s"


@pytest.mark.usefixtures("threads")
def test_an_engine_that_raises_is_an_outcome() -> None:
    found = run(Job(CELL, "ours", plan="/there/is/none.json"))
    assert found.error is not None
    assert found.error.startswith("PlanError: ")


def test_rows_of_each_device() -> None:
    for device in ("cpu", "cuda"):
        names = [row.name for row in rows_for(device)]
        assert len(names) == len(set(names))
        assert names[0] == "ours"
    assert {row.kind for row in ROWS if row.name == "zenflow"} == {"other mathematics"}
    with pytest.raises(ValueError, match="there is no row 'nobody'"):
        rows_for("cpu", ("nobody",))
