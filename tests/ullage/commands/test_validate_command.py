import json
from pathlib import Path

import pytest

from ullage.main import main

CASES = Path(__file__).parents[1] / "data" / "published_cases.json"


@pytest.fixture(scope="module")
def found() -> dict:
    return {case["id"]: case for case in json.loads(CASES.read_text())["cases"]}


def validated(capsys, *arguments) -> tuple[int, dict]:
    code = main(["validate", str(CASES), *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_errors_are_predicted_over_measured(found, capsys):
    code, result = validated(capsys)
    assert code == 0
    assert [case["id"] for case in result["cases"]] == list(found)
    for case in result["cases"]:
        measured = found[case["id"]]["measured"]
        wanted = {name.removesuffix("_ms") for name in measured if name.endswith("_ms")}
        assert {name for name in case if name in {"forward", "backward", "update", "iteration"}} == wanted
        for name in wanted:
            row = case[name]
            assert row["measured"] == pytest.approx(measured[f"{name}_ms"] / 1e3)
            assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        if "peak_gpu_allocated_gb" in measured:
            assert case["peak GPU"]["measured"] == pytest.approx(measured["peak_gpu_allocated_gb"] * 2**30)


def test_summaries_are_of_absolute_errors(capsys):
    _, result = validated(capsys)
    errors = [abs(case["iteration"]["error"]) for case in result["cases"]]
    rows = {(row["group"], row["quantity"]): row for row in result["summaries"]}
    overall = rows["all", "iteration"]
    assert overall["mean"] == pytest.approx(sum(errors) / len(errors))
    assert overall["median"] == pytest.approx(sorted(errors)[len(errors) // 2])
    assert (overall["worst"], overall["num_cases"]) == (pytest.approx(max(errors)), len(errors))
    assert rows[f"file {CASES.name}", "iteration"]["mean"] == overall["mean"]
    assert rows["hardware a100x4-40g", "update"]["num_cases"] == 2


def test_thresholds_decide_the_exit_code(capsys):
    two = ("--hardware", "a100x4-40g")
    _, result = validated(capsys, *two)
    rows = {(row["group"], row["quantity"]): row for row in result["summaries"]}
    mean_pct, worst_pct = (100 * rows["all", "iteration"][name] for name in ("mean", "worst"))
    for flag, value in (("--max-mean-error", mean_pct), ("--max-error", worst_pct)):
        assert validated(capsys, *two, flag, str(value * 1.01))[0] == 0
        code, result = validated(capsys, *two, flag, str(value * 0.9999))
        assert (code, len(result["failures"])) == (1, 1)
    assert main(["validate", str(CASES), *two, "--max-error", "0.001"]) == 1
    assert capsys.readouterr().out.count("failed: ") == len(result["cases"])


def test_choosing_cases(capsys):
    _, result = validated(capsys, "--hardware", "a100x4-40g", "--case", "*-async-flush")
    assert [case["id"] for case in result["cases"]] == ["a100x4-7b-l32-tp1-dp4-mb1-gb4-r1-sg100m-async-flush"]
    assert main(["validate", str(CASES), "--hardware", "none"]) == 2
    assert "no case is left" in capsys.readouterr().err


def test_what_cannot_be_predicted_is_an_error_even_among_what_can(found, tmp_path, capsys):
    path = tmp_path / "cases.json"
    cases = [*found.values(), {**found["h100x4-nvme-host-20b-cpu"], "id": "disk"}]
    cases[-1]["offload"] = {"params": "gpu", "optimizer": "pfs"}
    path.write_text(json.dumps({"schema_version": 1, "cases": cases}))
    assert main(["validate", str(path)]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "case disk: offload.optimizer: Input should be 'gpu', 'cpu' or 'nvme', not 'pfs'" in shown.err


def test_tables_have_every_case(found, capsys):
    assert main(["validate", str(CASES)]) == 0
    text = capsys.readouterr().out
    assert all(text.count(f"\n{name} ") >= 1 for name in found)
    assert "absolute errors" in text
