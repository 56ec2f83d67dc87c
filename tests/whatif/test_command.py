import csv
import json

import pyarrow.parquet
import pytest

from ullage.main import main
from ullage.whatif.study import load_study


def run(capsys, *arguments):
    code = main(["whatif", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def ask(tiny, tmp_path):
    return ("--model", tiny, "--hardware", "a100-80", "--workers", 1, "--output", tmp_path / "study.json")


def test_screen_tables_and_files_agree(ask, tmp_path, capsys):
    sweep = ("--sweep", "pcie=1x,2x", "--sweep", "device.memory_bytes=1MB,80GB")
    for suffix in ("csv", "parquet"):
        code, out, _ = run(capsys, *ask, *sweep, "--prices", "example", "--table", tmp_path / f"t.{suffix}")
        assert code == 0
    assert "points, predicted" in out
    assert "2 of 4 points: lacks memory" in out
    study = load_study(tmp_path / "study.json")
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert len(rows) == len(table) == len(study.points) == 4
    for row, typed, point in zip(rows, table, study.points, strict=True):
        assert {name: "" if value is None else str(value) for name, value in typed.items()} == row
        assert typed["host-link_factor"] == point.settings["host-link"]
        assert typed["host-link"] == point.varied["host-link"].after
        assert typed["iteration_s"] == (point.figures.iteration_s if point.figures else None)


def test_a_study_file_runs_again_to_the_same_bytes(ask, tmp_path, capsys):
    _, first, _ = run(capsys, *ask, "--sweep", "gpus=1", "--set", "pcie=2x", "--json")
    again = ("--workers", 1, "--output", tmp_path / "again.json", "--json")
    code, out, _ = run(capsys, tmp_path / "study.json", *again)
    assert (code, out) == (0, first)
    only_request = {"request": json.loads(first)["request"]}
    (tmp_path / "asked.json").write_text(json.dumps(only_request))
    assert run(capsys, tmp_path / "asked.json", *again)[1] == first


def test_fields_are_listed_with_units(capsys):
    code, out, _ = run(capsys, "--fields", "pcie")
    assert code == 0
    assert "host_link.down" in out
    assert "link.pcie.h2d_bytes_per_s is host_link.down" in out
    listed = json.loads(run(capsys, "--fields", "--json")[1])["fields"]
    units = {field["name"]: field["unit"] for field in listed}
    assert units["host.dram_bytes_per_s"] == "bytes_per_s"
    assert units["device.gemm.bf16"] == "flop_per_s"
    assert {"gpus", "optimizer", "model.num_layers", "host.num_cores", "clip"} <= set(units)


BAD = {
    "field": (["--set", "host.dram=2x"], ["'host.dram'", "host.dram_bytes_per_s", "--fields"]),
    "value": (["--set", "pcie=fast"], ["host-link=fast", "25GB/s"]),
    "form": (["--set", "pcie"], ["FIELD=VALUE"]),
    "mixed": (["--sweep", "pcie=1x,20GB/s"], ["factors"]),
    "no step": (["--sweep", "pcie=1x..4x"], ["no step"]),
    "twice": (["--sweep", "hardware=h100"], ["--hardware", "leave out one"]),
    "table": (["--table", "t.xlsx"], [".csv", ".parquet"]),
    "folder": (["--table", "no/t.csv"], ["no such folder"]),
    "points": (["--design", "random"], ["--design random,points=100"]),
    "prices": (["--prices", "none.json"], ["none.json", "--prices example"]),
    "tokens": (["--tokens", "many"], ["300B"]),
    "sensitivities of a sweep": (["--sensitivities", "--sweep", "gpus=1,2"], ["--set"]),
    "too many": (["--sweep", "pcie=1x..9000x..1x", "--sweep", "seq_len=1..2000"], ["--design random"]),
    "a file and more": (["study.json", "--set", "pcie=2x"], ["is a whole study", "leave out --set"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, ask, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, wanted = BAD[case]
    code, out, error = run(capsys, *arguments, *ask)
    assert (code, out, error.count("\n")) == (2, "", 1)
    for text in wanted:
        assert text in error
    assert not (tmp_path / "study.json").exists()


def test_a_study_needs_a_model(capsys, tmp_path):
    code, _, error = run(capsys, "--output", tmp_path / "s.json")
    assert (code, "--model" in error) == (2, True)
