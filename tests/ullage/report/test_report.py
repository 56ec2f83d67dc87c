"""``ullage report``: what is in the page, read without a browser. The browser's tests are in test_report_browser.py."""

import base64
import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_objects import SLOWER, Page, in_colour, page_of, part_of, pictures, slower_run

from planner.plan.document import EngineRow
from planner.schedule.tasks import MemoryClass, Op, Tier
from ullage.analysis.runs import save_run
from ullage.main import main
from ullage.output.palette import COLOURS, WORK, Work
from ullage.report import over_time
from ullage.report.charts import Axis, Band, Chart, Line, Trace
from ullage.report.files import side_by_side
from ullage.report.interactive import THEMES, figure
from ullage.report.page import render
from ullage.report.plan import engines_section

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'`{{7*7}}<b>$\\frac"
SECTIONS = ["peaks", "engines", "timeline", "memory", "traffic", "resources", "roofline", "tricks", "offloading"]


@pytest.fixture(scope="module")
def plan_part(plan):
    return part_of(plan)


@pytest.fixture(scope="module")
def run_part(plan):
    return part_of(slower_run(plan))


@pytest.fixture(scope="module")
def page(plan_part, run_part) -> Page:
    return page_of(plan_part, run_part)


def test_every_question_has_its_section(plan_part, run_part):
    assert [section.key for section in plan_part.sections] == SECTIONS
    assert [section.key for section in run_part.sections] == ["causes", "comparison", "refit", *SECTIONS]


def test_the_first_screen_says_what_is_predicted_and_what_measured(plan, plan_part, run_part):
    facts = {fact.name: fact for fact in plan_part.facts}
    assert facts["fits"].verdict == "good"
    assert facts["iteration"].origin == "predicted"
    assert facts["speed"].value == f"{plan.prediction.tokens_per_s:,.0f} tokens/s"
    measured = {fact.name: fact for fact in run_part.facts}
    assert measured["iteration"].origin == "measured"
    speed = float(measured["speed"].value.removesuffix(" tokens/s").replace(",", ""))
    assert speed == pytest.approx(plan.prediction.tokens_per_s / SLOWER, abs=1)


def test_what_does_not_fit_is_said_first(plan):
    use = plan.gpu_memory.model_copy(update={"capacity_bytes": plan.gpu_memory.peak_bytes - 1_000_000})
    memory = plan.prediction.memory | {Tier.GPU: use}
    short = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"memory": memory})})
    summary = part_of(short)
    assert "does not fit" in summary.sentence
    assert summary.facts[0].verdict == "bad"
    assert "lacks 1.00 MB of gpu memory" in summary.facts[0].words


def test_charts_hold_the_numbers_of_the_plan(plan, plan_part):
    shown, seen = pictures(plan_part), plan.prediction
    for row in shown["gantt"].traces:
        busy_s = sum(end_s - start_s for start_s, end_s in zip(row.x, row.y, strict=True))
        assert busy_s == pytest.approx(seen.busy_s[row.name]), row.name
    areas = [trace for trace in shown["memory-gpu"].traces if trace.mark == "area"]
    assert max(np.sum([trace.y for trace in areas], axis=0)) == seen.memory[Tier.GPU].peak_bytes
    engines = shown["engines"].traces[0]
    found = dict(zip(engines.y, engines.x, strict=True))
    assert found.pop("ullage") == seen.iteration_s
    assert found == {row.name: row.iteration_s for row in plan.engines if row.iteration_s is not None}
    moved = sum(task.num_bytes for task in plan.schedule().tasks if task.lane in {"h2d", "state-in", "activation-in"})
    faint = next(t for t in shown["traffic-host-link"].traces if t.faint and t.colour == "down")
    assert sum(np.diff(faint.x) * faint.y[:-1]) == pytest.approx(moved)
    peaks = {trace.name: trace.x[0] for trace in shown["peaks"].traces}
    of = seen.memory[Tier.GPU]
    assert peaks == pytest.approx({c: of.by_class.get(c, 0) / of.capacity_bytes for c in peaks})
    assert shown["offload-memory"].levels[0].value == of.capacity_bytes
    own = next(t for t in shown["offload-time"].traces if t.name == "this plan")
    assert own.y == [pytest.approx(seen.iteration_s)]


def test_a_lane_is_never_faster_than_its_roof(plan_part):
    lanes = pictures(plan_part)["lanes"]
    assert lanes.traces
    assert all(0 < share <= 1 + 1e-9 for trace in lanes.traces for share in trace.x)
    for key, chart in pictures(plan_part).items():
        if key.startswith("rates-"):
            roof, *tasks = chart.traces
            for trace in tasks:
                best = np.exp(np.interp(np.log(trace.x), np.log(roof.x), np.log(roof.y)))
                assert all(np.asarray(trace.y) <= best * 1.02), key


def test_measured_stands_beside_predicted(plan, run_part):
    shown = pictures(run_part)
    phases = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in shown["compared-phases"].traces}
    assert phases["measured"]["iteration"] == pytest.approx(SLOWER * phases["predicted"]["iteration"])
    assert phases["predicted"]["iteration"] == pytest.approx(plan.prediction.iteration_s)
    rows = shown["gantt"].traces
    assert [row.measured for row in rows] == [False, True] * (len(rows) // 2)
    for predicted, measured in zip(rows[::2], rows[1::2], strict=True):
        assert measured.name == predicted.name.replace("predicted", "measured")
        assert measured.y == pytest.approx(np.multiply(predicted.y, SLOWER), abs=5e-9)  # a run file has nanoseconds
    line = next(trace for trace in shown["memory-gpu"].traces if trace.measured)
    assert set(line.y) == {plan.gpu_memory.peak_bytes}
    for key in ("traffic-host-link", "traffic-dram", "phases", "busy", "lanes", "engines", "offload-time"):
        assert {trace.measured for trace in shown[key].traces} == {True, False}, key


def test_a_run_without_metered_memory_says_so(plan):
    run = slower_run(plan).model_copy(update={"device_bytes": {}})
    memory = next(section for section in part_of(run).sections if section.key == "memory")
    assert "run it again" in memory.words[0]
    assert not any(trace.measured for trace in memory.pictures[0].traces)


def test_every_task_has_a_colour_and_every_colour_two_grounds():
    assert set(WORK) == set(Op)
    for name, colour in COLOURS.items():
        for value in colour:
            assert re.fullmatch("#[0-9a-f]{6}", value), name


@given(st.lists(st.tuples(st.floats(0.0, 0.999), st.integers(0, 10**9)), min_size=1, max_size=50), st.integers(1, 9))
def test_fewer_steps_keep_the_peak(steps, num_parts):
    """And hold only what was held at some one moment."""
    times_s = np.array(sorted({0.0, *(at for at, _ in steps)}))
    first = np.resize([n for _, n in steps], len(times_s)).astype(float)
    held = {MemoryClass.PARAMETERS: first, MemoryClass.GRADIENTS: first[::-1] / 2}
    over_time._MOST_STEPS, before = num_parts, over_time._MOST_STEPS
    try:
        at_s, fewer = over_time._most_held(times_s, held, 1.0)
    finally:
        over_time._MOST_STEPS = before
    assert len(at_s) == num_parts
    total, full = sum(fewer.values()), sum(held.values())
    assert total.max() == full.max()
    moments = set(zip(*(held[kind].tolist() for kind in held), strict=True))
    assert set(zip(*(fewer[kind].tolist() for kind in held), strict=True)) <= moments


def test_gantt_ticks_are_finer_than_a_screen(plan_part):
    gantt = pictures(plan_part)["gantt"]
    drawn = figure(gantt)
    for row, of in zip(drawn["rows"], gantt.traces, strict=True):
        assert np.allclose(np.multiply(row["start"], drawn["tick"]), of.x, atol=gantt.period_s * 1e-7)
        assert [drawn["names"][i] for i in row["task"]] == list(of.texts)
        assert [drawn["work"][i]["name"] for i in row["work"]] == list(of.colour)


def test_plotly_knows_every_attribute(run_part):
    for picture in pictures(run_part).values():
        drawn = in_colour(figure(picture), THEMES["dark"])
        for note in drawn["layout"]["annotations"]:
            note.pop("share", None)  # the page's own
        known = go.Figure(data=drawn.get("data"), layout=drawn["layout"])  # raises for what it does not know
        assert len(known.data) == len(drawn.get("data") or ())


def test_the_page_needs_nothing_from_outside(page):
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            target = attributes.get(name) or ""
            assert target.startswith(("#", "data:,")) or not target, (tag, attributes)
    assert not [text for text in page.text("style") if "url(" in text or "@import" in text]
    policy = next(a["content"] for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = [
        text
        for attributes, text in zip(page.named("script"), page.text("script"), strict=True)
        if attributes.get("type") != "application/json"
    ]
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_every_chart_has_a_place_words_and_a_table(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    plots = {a["id"]: a for a in page.named("div") if a.get("class") == "plot"}
    assert set(plots) == {drawn["id"] for drawn in page.figures}
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in plots.values())
    assert len(page.named("figure")) == len(page.named("details")) == len(plots)
    linked = [a["href"][1:] for a in page.named("a")]
    assert len(linked) > len(SECTIONS)
    assert set(linked) <= set(ids)


def test_every_axis_has_a_title_and_its_unit(plan_part, run_part):
    for part in (plan_part, run_part):
        for picture in pictures(part).values():
            axes = [picture.x, picture.y]
            for axis in axes:
                if axis.title:
                    assert axis.unit or axis.title == "FLOP per byte"
            names = any(trace.mark in {"bars", "tasks"} for trace in picture.traces)
            assert picture.x.title
            assert names or picture.y.title
            table = picture.table
            assert table.rows
            assert all(len(row) == len(table.columns) for row in table.rows)


def test_hostile_names_stay_text(plan):
    model = plan.model.model_copy(update={"name": HOSTILE})
    hardware = plan.hardware.model_copy(update={"description": HOSTILE})
    run = slower_run(plan.model_copy(update={"model": model, "hardware": hardware}).sealed(), machine=HOSTILE)
    part = part_of(run)
    page = page_of(part)
    assert page.words.count(HOSTILE) >= 3
    assert [a.get("type", a.get("id")) for a in page.named("script")] == [
        "application/json",
        "application/json",
        None,
        None,
    ]
    assert not page.named("img")
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "<b>" not in json.dumps(page.figures).replace("<br>", "")


def test_names_in_charts_are_no_tags():
    """plotly.js knows a few: names of units, which a captured module gives, must not be read as such."""
    x, y = Axis("x", "s"), Axis("y", "B")
    trace = Trace(HOSTILE, [1.0], [HOSTILE], "bars", "first", texts=[HOSTILE])
    bars = Chart("bars", HOSTILE, HOSTILE, x, (trace,))
    level, band = Line(1.0, HOSTILE), Band(0.0, 1.0, HOSTILE, "grid")
    line = Trace(HOSTILE, [0.0, 1.0], [0.0, 1.0], "line", "first", texts=[HOSTILE] * 2)
    lines = Chart("lines", HOSTILE, HOSTILE, x, (line,), y, levels=(level,), bands=(band,))
    row = Trace(HOSTILE, [0.0], [1.0], "tasks", [Work.UPDATE], texts=[HOSTILE])
    gantt = Chart("gantt", "", "", x, (row,), bands=(band,), over_time=True, period_s=1.0)
    for picture in (bars, lines, gantt):
        text = re.sub("<(br|extra|/extra)>", "", json.dumps(figure(picture)))
        assert "&lt;script" in text or "&lt;/script" in text
        assert "<" not in text, picture.key


def test_several_files_stand_side_by_side(plan_part, run_part):
    table = side_by_side([plan_part, run_part])
    assert table.columns[1:] == tuple(f"{p.title} ({p.kind})" for p in (plan_part, run_part))
    assert [row[0] for row in table.rows] == [fact.name for fact in plan_part.facts]
    predicted, measured = next(row[1:] for row in table.rows if row[0] == "iteration")
    assert predicted.endswith(", predicted")
    assert measured.endswith(", measured")
    words = Page(render([plan_part, run_part], table)).words
    assert "Side by side" in words
    assert side_by_side([plan_part]) is None


def test_the_command_says_where_and_what(plan, plan_path, tmp_path, capsys):
    save_run(slower_run(plan), tmp_path / "run.json")
    output = tmp_path / "both.html"
    assert main(["report", str(plan_path), str(tmp_path / "run.json"), "--output", str(output), "--json"]) == 0
    output_json = json.loads(capsys.readouterr().out)
    assert output_json["output"] == str(output)
    assert output_json["num_bytes"] == output.stat().st_size
    assert [part["kind"] for part in output_json["parts"]] == ["plan", "run"]
    assert output_json["parts"][0]["sections"]["memory"] == ["memory-gpu", "memory-host"]
    assert main(["report", str(plan_path), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"report written to {output}\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read {path}: No such file or directory; give a file that `ullage plan`"),
        ("{", "is not JSON"),
        ("[]", "is not a plan, run or study"),
        ('{"host_link": 1}', "is not a plan, run or study"),
        ('{"decisions": 1, "schema_version": 99}', "has schema_version 99, but this program reads"),
        ('{"start_s": [], "schema_version": 99}', "has schema_version 99, but this program reads 1"),
    ],
)
def test_bad_files_are_one_line(content, says, tmp_path, capsys):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path), "--output", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert says.format(path=path) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


def test_bad_outputs_are_one_line(plan_path, tmp_path, capsys):
    assert main(["report", str(plan_path), "--output", "r.pdf"]) == 2
    assert "--output r.pdf: a report is HTML; let its name end in .html" in capsys.readouterr().err
    assert main(["report", str(plan_path), "--output", str(tmp_path / "no" / "r.html")]) == 2
    assert "r.html: there is no such folder; make it first\n" in capsys.readouterr().err


def test_without_the_extra_the_remedy_is_named(plan_path, tmp_path):
    code = "import sys; sys.modules['plotly'] = None; from ullage.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", code, "report", str(plan_path), "--output", str(tmp_path / "r.html")]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr == "ullage report: error: a report needs plotly and jinja2; pip install 'ullage[report]'\n"


def test_equal_plans_have_equal_pages(plan, plan_part):
    assert render([plan_part]) == render([part_of(plan)])


def test_the_best_other_engine_is_one_that_fits(plan):
    lacking = EngineRow(name="too large", setting="", fits=False, iteration_s=1e-9, missing_bytes={Tier.GPU: 1})
    best = min((row for row in plan.engines if row.fits), key=lambda row: row.iteration_s)
    section = engines_section(plan.model_copy(update={"engines": (lacking, *plan.engines)}), None)
    assert f"that fits is {best.name}:" in section.words[0]
    alone = plan.model_copy(update={"engines": ()})  # as plans of ``prepare`` are
    assert "`ullage simulate PLAN --engine NAME`" in engines_section(alone, None).words[0]
