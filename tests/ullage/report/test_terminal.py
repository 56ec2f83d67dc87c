"""The terminal prints the sections that the page draws."""

import dataclasses

import pytest

from planner.costs.resources import Resource
from ullage.analysis.simulation import planned
from ullage.output.palette import Work
from ullage.report.charts import Axis, Band, Chart, Fact, Part, Section, Table, Trace
from ullage.report.iteration import iteration_part
from ullage.report.plan import plan_part
from ullage.report.terminal import show

TIME = Axis("time", "s")
BANDS = (Band(0.0, 1.0, "forward", "first"), Band(1.0, 4.0, "backward", "second"))


def test_facts_words_and_tables_are_printed_with_empty_lines_between_them(capsys):
    table = Table("sizes", ("", "size", "where"), (("a", "1.50 GB", "host"), ("bb", "12 B", "-")), "a note", bold=(0,))
    facts = (Fact("fits", "yes", "at the peak", "good"), Fact("speed", "5"))
    show(Part("t", "plan", "", facts, {"model": "m"}, (Section("s", "S", "S", ("words",), (table,)),), ("odd",)), "end")
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "fits   yes; at the peak", "speed  5", "model  m", "", "words", "", "sizes", "       size  where",
        "a   1.50 GB  host", "bb     12 B  -", "a note", "warning: odd", "end",
    ]  # fmt: skip


def test_charts_over_time_are_lines_of_bars_below_the_letters_of_their_intervals(capsys):
    areas = (
        Trace("low", [0.0, 2.0, 4.0], [1.0, 0.0, 0.0], "area", "first"),
        Trace("high", [0.0, 2.0, 4.0], [1.0, 4.0, 4.0], "area", "second"),
    )
    chart = Chart("m", "Memory", "", TIME, areas, Axis("memory", "B"), bands=BANDS, over_time=True)
    show(chart, chart)
    lines = capsys.readouterr().out.splitlines()
    letters, meaning, low, high, both = lines[1:6]
    assert (letters.count("f"), letters.count("b"), meaning.strip()) == (18, 54, "b backward, f forward")
    assert (low.count("▃"), high.count("█"), high.count("▃")) == (36, 36, 36)
    assert both.endswith("| peak 4.00 B")
    assert "".join(lines).count("b backward") == 1, "intervals of the chart before are not repeated"


def test_one_row_of_tasks_is_a_line_of_letters_and_several_are_only_on_the_page(capsys):
    work, texts = [Work.FORWARD, Work.UPDATE], ["compute", "cpu"]
    row = Trace("path", [0.0, 3.0], [3.0, 4.0], "tasks", work, texts=texts)
    path = Chart("one", "Path", "", TIME, (row,), over_time=True, period_s=4.0)
    show(path, dataclasses.replace(path, key="two", title="Tasks", traces=(row, row)))
    title, letters, meaning = capsys.readouterr().out.splitlines()
    assert (title, letters.count("c"), letters.count("p"), meaning.strip()) == ("Path", 54, 18, "c compute, p cpu")


@pytest.mark.parametrize("resource", [*Resource, None])
def test_the_critical_path_says_what_was_short(plan, resource):
    seen = planned(plan)
    longest = max(seen.steps, key=lambda step: step.length_s)
    vars(seen)["steps"] = (longest,)
    vars(seen)["slowed_steps"] = {} if resource is None else {longest: (longest.length_s, resource)}
    tables = {part.title: part for part in iteration_part(seen).sections[0].parts}
    (row,) = tables["critical path"].rows
    assert row[-1].split()[:1] == ([] if resource is None else [resource.name.lower()])


def test_pages_and_screens_have_the_same_figures(plan, capsys):
    part = plan_part(plan)
    show(part)
    words = " ".join(capsys.readouterr().out.split())
    for fact in part.facts:
        assert f"{fact.name} {fact.value}" in words
    for section in part.sections:
        for table in section.parts:
            if isinstance(table, Table):
                assert all(row[0] in words for row in table.rows)
