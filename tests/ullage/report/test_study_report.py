"""The page of a study: curves, maps, and what binds."""

import math

import plotly.graph_objects as go
import pytest
from report_objects import in_colour, page_of, part_of, pictures, study

from ullage.main import main
from ullage.report.charts import Table
from ullage.report.interactive import THEMES, figure


def table_of(part, title):
    tables = [each for section in part.sections for each in section.parts if isinstance(each, Table)]
    return next(table for table in tables if table.title == title)


def test_a_study_has_curves_what_binds_and_the_front():
    example_study = study()
    part = part_of(example_study)
    shown = pictures(part)
    assert [s.key for s in part.sections] == [
        "answer", "maps", "along-gpus", "along-host-link", "bottlenecks", "sensitivities", "money", "notes"
    ]  # fmt: skip
    fits = [point for point in example_study.points if point.figures]
    for key, read in {
        "along-gpus-speed": lambda p: (p.settings["gpus"], p.figures.tokens_per_s),
        "along-host-link-iteration": lambda p: (p.varied["host-link"].after, p.figures.iteration_s),
        "along-host-link-cost": lambda p: (p.varied["host-link"].after, p.cost.per_million_tokens),
    }.items():
        drawn = [pair for trace in shown[key].traces for pair in zip(trace.x, trace.y, strict=True)]
        assert sorted(drawn) == sorted(map(read, fits))
    assert shown["bottlenecks"].traces[0].texts == ["8 points", "3 points"]
    front = shown["pareto"].traces[-1]
    assert list(front.x) == sorted(p.figures.tokens_per_s for p in fits if p.on_front)
    table = table_of(part, "points, predicted")
    assert len(table.rows) == len(example_study.points)
    assert table.rows[0][:2] == ("1", "0.5x")
    assert "lacks memory" in table.rows[0]
    assert "1 of 12 points: lacks memory: lacks 5 GB" in part.sections[0].words
    assert part.facts[0].value == "11 of 12"
    assert "no plan" in str(shown["sensitivities"].traces[1].texts)
    assert page_of(part).named("figure")
    for picture in shown.values():
        go.Figure(data=figure(picture)["data"] and in_colour(figure(picture)["data"], THEMES["light"]))


def test_two_fields_make_a_map_of_speed_and_one_of_cost():
    example_study = study()
    shown = pictures(part_of(example_study))
    for key, read in {"speed": lambda p: p.figures.tokens_per_s, "cost": lambda p: p.cost.per_million_tokens}.items():
        drawn = shown[f"map-gpus-host-link-{key}"]
        assert [(row.name, row.x) for row in drawn.traces] == [(f, ["1", "2", "3", "4"]) for f in ("0.5x", "1x", "2x")]
        found = {
            (gpus, factor): None if math.isnan(value) else value
            for factor, row in zip(example_study.axes[1].values, drawn.traces, strict=True)
            for gpus, value in zip(example_study.axes[0].values, row.y, strict=True)
        }
        assert found == {
            (p.settings["gpus"], p.settings["host-link"]): read(p) if p.figures else None for p in example_study.points
        }
        assert drawn.table.rows[0][:2] == ("0.5x", "-")
        assert "lacks 5 GB" in drawn.traces[0].texts[0]
        (cells,) = figure(drawn)["data"]
        assert cells["z"][0][0] is None


def test_a_map_of_three_fields_has_the_best_of_the_third():
    example_study = study()
    third = example_study.axes[0].model_copy(update={"name": "micro_batch", "values": (1, 2)})
    slower = [
        point.model_copy(
            update={
                "settings": point.settings | {"micro_batch": size},
                "result": point.result.model_copy(
                    update={"figures": point.figures.model_copy(update={"tokens_per_s": size * 100.0})}
                ),
            }
        )
        for point in example_study.points
        if point.figures
        for size in (1, 2)
    ]
    three = example_study.model_copy(update={"axes": (*example_study.axes, third), "points": tuple(slower)})
    shown = pictures(part_of(three))
    rows = shown["map-gpus-host-link-speed"].traces
    assert {value for row in rows for value in row.y if not math.isnan(value)} == {200.0}
    assert (rows[0].texts[0], math.isnan(rows[0].y[0])) == ("not planned", True)
    assert [row.y for row in shown["map-gpus-micro-batch-speed"].traces] == [[100.0] * 4, [200.0] * 4]


def test_fields_that_go_side_by_side_make_no_map():
    example_study = study(num_values=3)
    beside = [p for p in example_study.points if p.settings["host-link"] == (0.5, 1.0, 2.0)[p.settings["gpus"] - 1]]
    part = part_of(example_study.model_copy(update={"points": tuple(beside[1:])}))
    assert "maps" in [section.key for section in part.sections], "two of four pairs are half"
    assert "maps" not in [s.key for s in part_of(example_study.model_copy(update={"points": tuple(beside)})).sections]


def test_of_many_combinations_the_best_is_drawn():
    part = part_of(study(num_values=8, priced=False))
    chart = pictures(part)["along-host-link-speed"]
    assert [trace.name for trace in chart.traces] == ["all points", "the best of all others"]
    best = chart.traces[1]
    assert list(best.x) == [10e9, 20e9, 40e9]
    assert list(best.y) == pytest.approx([8000.0, 8800.0, 8800.0])
    assert "money" not in [section.key for section in part.sections]


def test_a_study_that_was_not_run_says_how(tmp_path, capsys):
    path = tmp_path / "study.json"
    path.write_text(study().model_copy(update={"points": (), "sensitivities": None}).to_json())
    assert main(["report", str(path), "--output", str(tmp_path / "r.html")]) == 2
    assert f"{path} is a study that was not run; run it with `ullage whatif {path}`" in capsys.readouterr().err
