"""Reports in a real browser: any Chromium, of ``ULLAGE_BROWSER`` or of the PATH; skipped where there is none."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_objects import part_of, slower_run, study

from planner.schedule.tasks import Op
from ullage.output.palette import COLOURS, SCALE, WORK
from ullage.report.charts import Axis, Chart, Part, Section, Trace
from ullage.report.page import render

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("ULLAGE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: install one of {', '.join(NAMES)}, or name one in ULLAGE_BROWSER"
)
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
NUM_TASKS, LANES = 60_000, 4


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    # Chromium refuses its sandbox to root, as in a container.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=arguments)
        yield started
        started.close()


class Shown:
    """A page that is open, with what went wrong in it and what it asked the network for."""

    def __init__(self, browser: "playwright.Browser", path: Path, **context) -> None:
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(600_000)  # a loaded machine is no failure
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(path.as_uri())
        self.drawn()

    def drawn(self) -> None:
        self.page.wait_for_selector("html[data-drawn=yes]", state="attached")

    def run(self, code: str):
        return self.page.evaluate(code)

    def until(self, code: str) -> None:
        """Wait until something is true; playwright's own way would need the page to allow ``eval``."""
        for _ in range(400):  # looks, not seconds: a loaded machine is no failure
            if self.run(code):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {code}")

    def ranges(self) -> dict[str, list[float]]:
        """What part of the iteration every chart over time shows."""
        return self.run(
            "Object.fromEntries(JSON.parse(document.getElementById('figures').textContent).filter(f => f.linked)"
            ".map(f => [f.id, document.getElementById(f.id).layout.xaxis.range.map(Number)]))"
        )

    def check(self) -> None:
        assert self.messages == []
        assert len(set(self.urls)) == 1, self.urls

    def close(self) -> None:
        self.check()
        self.context.close()


@pytest.fixture(scope="module")
def report(plan, tmp_path_factory) -> Path:
    """A report of a plan and of a run, with names that would rather be code."""
    model = plan.model.model_copy(update={"name": HOSTILE})
    run = slower_run(plan.model_copy(update={"model": model}).sealed(), machine=HOSTILE)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render([part_of(plan), part_of(run), part_of(study())]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser, report) -> Iterator[Shown]:
    found = Shown(browser, report, viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield found
    found.close()


@pytest.fixture
def shown(opened) -> Iterator[Shown]:
    """The same open page for all tests, which leave it as it was: drawing it takes seconds."""
    yield opened
    opened.check()


def test_every_chart_is_drawn_with_its_data(shown):
    places = shown.run(
        """[...document.querySelectorAll('.plot')].map(place => ({
            id: place.id,
            traces: place.data.length,
            filled: place.data.filter(trace => trace.x.length > 0).length,
            marks: place.querySelectorAll('.main-svg path.js-fill, .main-svg path.js-line, .main-svg .point, '
                + '.main-svg .hm image').length,
            height: place.querySelector('.main-svg').getBoundingClientRect().height,
            wide: place.querySelector('.main-svg').getBoundingClientRect().width <= place.clientWidth + 1,
        }))"""
    )
    assert len(places) > 25
    for place in places:
        assert place["filled"] == place["traces"] > 0, place
        assert place["marks"] > 0, place
        assert place["height"] > 100, place
        assert place["wide"], place


def test_a_map_has_its_figures_in_cells_of_the_colours_of_the_theme(shown):
    place = "document.getElementById('part2-chart-map-gpus-host-link-speed')"
    written = shown.run(f"[...{place}.querySelectorAll('.heatmap-label')].map(each => each.textContent)")
    faster = ["1,100", "2,200", "3,300", "4,400"]
    assert sorted(written) == sorted(["-", "2,000", "3,000", "4,000", *faster, *faster])
    assert shown.run(f"{place}.data[0].colorscale.map(([_, colour]) => colour)") == [COLOURS[n][0] for n in SCALE]


def test_names_do_nothing(shown):
    assert shown.page.title().endswith("side by side")
    assert shown.run("document.querySelectorAll('main img, .plot img').length") == 0
    assert shown.run("document.querySelector('#part1 h1').textContent").startswith(HOSTILE)
    assert HOSTILE in shown.run("document.querySelector('#part1 .about').textContent")


def test_zooming_one_chart_zooms_all_over_the_same_iteration(shown):
    before = shown.ranges()
    assert len(before) > 8
    place = shown.page.locator("#part0-chart-traffic-dram .nsewdrag")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    y = box["y"] + box["height"] / 2
    shown.page.mouse.move(box["x"] + 0.25 * box["width"], y)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 0.5 * box["width"], y, steps=4)
    shown.page.mouse.up()
    shown.until("document.getElementById('part0-chart-gantt').layout.xaxis.range[0] > 0")
    after = shown.ranges()
    (period_s,) = {tuple(shown_range) for key, shown_range in before.items() if key.startswith("part0")}
    for key, shown_range in after.items():
        if key.startswith("part1"):
            assert shown_range == before[key], "another file's iteration is another one"
        else:
            assert shown_range == pytest.approx([0.25 * period_s[1], 0.5 * period_s[1]], abs=0.02 * period_s[1])
    shown.page.mouse.dblclick(box["x"] + 0.5 * box["width"], y)
    shown.until("document.getElementById('part0-chart-gantt').layout.xaxis.range[0] === 0")
    assert shown.ranges() == before


def test_colours_follow_the_system_and_the_switch(browser, tmp_path):
    path = tmp_path / "study.html"  # of one part: each change draws all charts again
    path.write_text(render([part_of(study())]), encoding="utf-8")
    shown = Shown(browser, path, color_scheme="light")

    def grounds(theme: str) -> str:
        """Wait until the charts have a theme, and return the ground of the page."""
        colour = COLOURS["paper"][theme == "dark"]
        shown.until(f"[...document.querySelectorAll('.plot')].every(each => each.layout.paper_bgcolor === '{colour}')")
        return shown.run("getComputedStyle(document.body).backgroundColor")

    light = grounds("light")
    shown.page.emulate_media(color_scheme="dark")
    dark = grounds("dark")
    assert dark != light
    shown.page.click("[data-choose=light]")
    assert grounds("light") == light
    shown.page.reload()
    shown.drawn()
    assert grounds("light") == light, "the choice is kept"
    shown.page.click("[data-choose=dark]")
    assert grounds("dark") == dark
    assert shown.page.get_attribute("[data-choose=dark]", "aria-pressed") == "true"
    shown.page.click("[data-choose=auto]")
    shown.page.emulate_media(color_scheme="light")
    assert grounds("light") == light
    shown.close()


def test_a_phone_has_no_need_to_scroll_sideways(browser, report):
    phone = Shown(browser, report, viewport={"width": 360, "height": 740}, has_touch=True)
    assert phone.run("document.documentElement.scrollWidth") == 360
    widths = phone.run(
        "[...document.querySelectorAll('.plot .main-svg')].map(each => each.getBoundingClientRect().right)"
    )
    assert max(widths) <= 360
    assert phone.run("document.getElementById('part0-chart-gantt').layout.dragmode") is False, "a drag scrolls"
    phone.close()


def test_on_paper_all_charts_are_light_and_fit(shown, tmp_path):
    every = "[...document.querySelectorAll('.plot')].every(each => each.layout.paper_bgcolor === '{}')"
    shown.page.emulate_media(color_scheme="dark")
    shown.until(every.format(COLOURS["paper"][1]))
    shown.page.emulate_media(media="print", color_scheme="dark")
    shown.until(every.format(COLOURS["paper"][0]))
    assert shown.run("getComputedStyle(document.querySelector('.top')).display") == "none"
    widths = shown.run(
        "[...document.querySelectorAll('.plot .main-svg')].map(each => each.getBoundingClientRect().width)"
    )
    assert max(widths) <= 700
    printed = shown.page.pdf(path=str(tmp_path / "report.pdf"), prefer_css_page_size=True)
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    shown.page.emulate_media(media="screen", color_scheme="dark")
    shown.until(every.format(COLOURS["paper"][1]))
    shown.page.emulate_media(color_scheme="light")
    shown.until(every.format(COLOURS["paper"][0]))


def many_tasks() -> Part:
    """Sixty thousand tasks of very different lengths on a few lanes."""
    ops = (Op.FORWARD, Op.FETCH, Op.BACKWARD, Op.FLUSH)
    each, slot_s = NUM_TASKS // LANES, LANES / NUM_TASKS
    rows = []
    for lane in range(LANES):
        start_s = [i * slot_s for i in range(each)]
        end_s = [s + slot_s * (0.2 + 0.7 * (i % 10 == lane)) for i, s in enumerate(start_s)]
        work = [WORK[ops[(i // 100) % 4]] for i in range(each)]
        names = [f"task {lane}-{i}" for i in range(each)]
        rows.append(Trace(f"lane {lane}", start_s, end_s, "tasks", work, texts=names))
    x, title = Axis("time", "s"), "Many tasks"
    gantt = Chart("gantt", title, "All of them.", x, tuple(rows), over_time=True, period_s=1.0)
    return Part("Many tasks", "plan", "", (), {}, (Section("timeline", "Tasks", "Tasks", (), (gantt,)),))


def test_many_tasks_are_merged_below_a_pixel_and_come_apart(browser, tmp_path):
    path = tmp_path / "many.html"
    path.write_text(render([many_tasks()]), encoding="utf-8")
    phone = Shown(browser, path, viewport={"width": 1280, "height": 900})
    bars = (
        "(() => {const d = document.getElementById('part0-chart-gantt').data;"
        "return [d.slice(0, -1).reduce((n, t) => n + t.x.filter(x => x === null).length, 0), d.at(-1).text]})()"
    )
    number, texts = phone.run(bars)
    assert 0 < number < LANES * 1280
    assert any("tasks, mostly forward" in text for text in texts)
    phone.run("Plotly.relayout('part0-chart-gantt', {'xaxis.range': [0.5, 0.501]})")
    number, texts = phone.run(bars)
    names = {text.partition("<br>")[0] for text in texts}
    first = int(0.5 * NUM_TASKS / LANES)
    for lane in range(LANES):
        for i in range(first + 1, first + 14):
            assert f"task {lane}-{i}" in names
    assert number <= LANES * 18
    phone.close()
