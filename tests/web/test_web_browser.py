"""The page in a real browser: any Chromium, of ``ULLAGE_BROWSER`` or of the PATH; skipped where there is none."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from amount import ALL
from serving import QUICK, Served

import ullage
from ullage.output.palette import COLOURS

NO_CHARTS = "window.Plotly = { react() {}, Icons: {} };"
ADDRESS = "#?model=opt-125m&machine=h100&gpus=1"


class Page:
    """A page that is open, with what it said and what it asked."""

    def __init__(self, browser, served: Served, fragment: str = ADDRESS, *, charts: bool = False, **context) -> None:
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(300_000)  # a loaded machine is no failure
        if not charts:  # a browser reads the script of charts in a second, for each page
            self.context.route("**/assets/plotly.js", lambda route: route.fulfill(body=NO_CHARTS))
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.asked: list[tuple[str, dict]] = []
        self.urls: set[str] = set()
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(served.address + fragment, wait_until="commit")

    def _note(self, request) -> None:
        self.urls.add(re.sub(r"[?#].*", "", request.url))
        if request.method == "POST":
            self.asked.append((request.url.rpartition("/")[2], json.loads(request.post_data)))

    def answered(self, does: Callable[[], object] | None = None) -> None:
        """Do something, and wait until the page has answered once more."""
        number = "Number(document.documentElement?.dataset.answered ?? 0)"
        before = self.page.evaluate(number) if does else 0
        if does:
            does()
        self.until(f"{number} > {before}")

    def asks(self, does: Callable[[], object]) -> None:
        """Do something, and wait until the page has asked; what was asked before is cancelled."""
        before = len(self.asked)
        does()
        while len(self.asked) == before:
            self.page.wait_for_timeout(10)

    def until(self, code: str) -> None:
        """Wait until something is true; playwright's own way would need the page to allow ``eval``."""
        for _ in range(3000):
            if self.page.evaluate(code):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {code}; {self.page.inner_text('body')[:500]}")

    def sentence(self) -> str:
        return self.page.inner_text("#answer .sentence")

    def close(self, served: Served) -> None:
        # A request that is refused is logged by the browser itself, and its line is shown.
        assert [text for text in self.messages if "status of 400" not in text] == []
        assert all(url.startswith((served.address, "blob:")) for url in self.urls)
        self.context.close()


@pytest.fixture
def opened(browser, served) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def opening(*arguments, **options) -> Page:
        pages.append(Page(browser, served, *arguments, **options))
        return pages[-1]

    yield opening
    for each in pages:
        each.close(served)


def test_a_first_visitor_has_an_answer_for_llama_on_one_rtx_4090(opened) -> None:
    page = opened("", charts=True)
    page.until("document.querySelector('#answer .sentence') !== null")  # the plan of a short search
    assert page.sentence().startswith("llama-3-8b fits on 1 device of rtx-4090.")
    assert "model=llama-3-8b&machine=rtx-4090&gpus=1" in page.page.url


def test_an_address_that_is_shared_asks_the_same(opened) -> None:
    page = opened()
    page.answered()
    page.answered(lambda: page.page.select_option("#machine", "rtx-4090"))
    page.answered(lambda: page.page.select_option("#optimizer", "lion"))
    other = opened(page.page.url.partition("/#")[2] and "#" + page.page.url.partition("#")[2])
    other.answered()
    assert other.sentence() == page.sentence()
    assert other.asked[-1] == page.asked[-1]
    page.answered(page.page.go_back)
    assert page.asked[-1][1]["optimizer"] == "adamw"
    damaged = opened("#?model=opt-125m&machine=h100&config=@@@")
    damaged.until("document.getElementById('error')?.textContent.includes('damaged')")


def test_every_control_of_the_question_is_asked(opened) -> None:
    page = opened()
    page.answered()
    form = page.page
    for name, text in {"gpus": "2", "seq_len": "256", "step_tokens": "4096"}.items():
        page.asks(lambda name=name, text=text: (form.fill(f"#{name}", text), form.press(f"#{name}", "Tab")))
        assert page.asked[-1][1][name] == int(text)
    chosen = {"optimizer": "lion", "precision": "bf16", "storage": "gpu", "machine": "a100-80"}
    for name, value in chosen.items():
        page.asks(lambda name=name, value=value: form.select_option(f"#{name}", value))
        assert page.asked[-1][1][name] == value
    assert form.is_hidden("#rank")
    page.asks(lambda: form.check("input[value=qlora]"))
    page.asks(lambda: (form.fill("#rank", "4"), form.press("#rank", "Tab")))
    assert page.asked[-1][1]["how"] == "qlora"
    assert page.asked[-1][1]["rank"] == 4
    page.answered(lambda: form.evaluate(f"history.go(-{len(page.asked) - 1})"))  # to the first question
    times = form.inner_text("#answer dl.facts")
    for name, text in {"tokens": "300", "days": "0.01", "price": "3"}.items():
        page.answered(lambda name=name, text=text: (form.fill(f"#{name}", text), form.press(f"#{name}", "Tab")))
    facts = form.inner_text("#answer dl.facts")
    assert facts != times
    assert "later than 0.01 days" in facts
    assert "your price" in facts
    assert "tokens" not in page.asked[-1][1]
    form.fill("#model", "</option><script>alert(1)</script>")
    form.click("button.main")
    page.until("!document.getElementById('error').hidden")
    assert "no model is called" in form.inner_text("#error")
    assert "<script>" in form.inner_text("#error")


def test_every_number_opens_its_why(opened) -> None:
    page = opened()
    page.answered()
    page.page.evaluate("document.querySelectorAll('#answer details').forEach(each => { each.open = true; })")
    buttons = page.page.locator("#answer .why")
    facts = page.page.locator("#answer dl.facts > div").count()
    cells = page.page.locator("#answer td", has_text=re.compile(r"^[\d,.]+( [kMGT]?B| [mµ]?s| %)?$"))
    assert cells.count() > 12
    assert cells.count() == page.page.locator("#answer td > .cell").count()
    assert buttons.count() == facts + 2 + cells.count()
    for number in [*range(facts + 1), *range(facts + 2, buttons.count(), 9)]:
        button = buttons.nth(number)
        button.focus()
        button.press("Enter")
        page.until("document.querySelectorAll('.reasons').length === 1 && document.getElementById('cancel').hidden")
        assert button.get_attribute("aria-expanded") == "true"
        assert len(page.page.inner_text(".reasons")) > 40
    assert button.inner_text() in page.page.inner_text(".reasons h3")
    page.page.click("text=close")
    assert page.page.locator(".reasons").count() == 0
    assert button.evaluate("each => each === document.activeElement")


def test_what_is_taken_along(opened, tmp_path: Path) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    page.answered()
    for words, check in {
        "plan.json": lambda path: ullage.load_plan(path).model.name == "opt-125m",
        "Report": lambda path: path.read_text("utf-8").startswith("<!doctype html>"),
    }.items():
        with page.page.expect_download() as download:
            page.page.click(f"#answer .actions >> text={words}")
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        assert check(path)
    for words, begin in {
        "Copy command line": "ullage plan --model opt-125m",
        "Copy Python": "import ullage",
        "Copy address": "http",
    }.items():
        page.page.click(f"text={words}")
        page.until("document.getElementById('status').textContent.includes('copied')")
        assert page.page.evaluate("navigator.clipboard.readText()").startswith(begin)


def test_answers_are_compared_and_one_axis_is_swept(opened) -> None:
    page = opened()
    page.answered()
    for gpus in ("2", "4", "1"):
        page.page.click("text=Keep beside")
        page.answered(lambda gpus=gpus: (page.page.fill("#gpus", gpus), page.page.press("#gpus", "Tab")))
    assert page.page.locator("#beside thead th").count() == 4
    page.page.click("text=Keep beside")
    assert "remove one" in page.page.inner_text("#error")
    other = opened("#" + page.page.url.partition("#")[2])
    other.answered()
    other.until("!document.getElementById('beside-result').textContent.includes('...')")
    assert other.page.inner_text("#beside-result") == page.page.inner_text("#beside-result")
    page.page.click("#beside button >> nth=0")
    assert page.page.locator("#beside thead th").count() == 3
    page.page.click("#run-sweep")
    page.until(
        "document.querySelectorAll('#sweep-result tbody tr').length === 7 && document.getElementById('cancel').hidden"
    )
    page.page.focus("#slider")
    page.page.keyboard.press("ArrowRight")
    assert page.page.inner_text("#sweep-result tr.chosen td >> nth=0") == "2"
    assert page.page.get_attribute("#slider", "aria-valuetext").startswith("2: ")
    page.answered(lambda: page.page.click("text=Ask this"))
    assert page.asked[-1][1]["gpus"] == 2
    page.page.click("text=Cheapest machine")
    page.until("document.querySelector('#cheapest table') !== null")  # the first machine, before all others
    page.until("document.getElementById('cancel').hidden")
    assert "others cost at least" in page.page.inner_text("#cheapest")
    page.asks(lambda: page.page.click("#cheapest th a >> nth=0"))
    assert page.page.inner_text("#cheapest th a >> nth=0").endswith(page.asked[-1][1]["machine"])


def test_who_cancels_keeps_the_machines_that_are_known(opened) -> None:
    page = opened("")
    page.until("document.querySelector('#answer .sentence') !== null")
    page.page.click("text=Cheapest machine")
    page.until("document.querySelectorAll('#cheapest tbody tr').length > 0")
    page.page.click("#cancel")
    assert "So far" in page.page.inner_text("#cheapest")
    assert "tokens/s" in page.page.inner_text("#cheapest")


def test_the_timeline_is_zoomed_in_both_themes(opened) -> None:
    page = opened(color_scheme="dark", charts=True)
    page.answered()
    page.page.click("#load-details")
    gantt = "document.getElementById('details-chart-gantt')"
    page.until(f"{gantt}?.layout !== undefined && document.documentElement.dataset.drawn === 'yes'")
    assert page.page.evaluate(f"{gantt}.layout.paper_bgcolor") == COLOURS["paper"][1]
    whole = page.page.evaluate(f"{gantt}.layout.xaxis.range.map(Number)")
    page.page.locator("#details-chart-gantt").hover(position={"x": 500, "y": 30})  # in no way that the policy refuses
    page.until("document.querySelector('#details-chart-gantt .hovertext') !== null")
    page.page.evaluate(f"Plotly.relayout({gantt}, {{'xaxis.range': [{whole[1] / 4}, {whole[1] / 2}]}})")
    linked = "[...document.querySelectorAll('#details .plot')].filter(each => each.layout?.xaxis?.range[0] > 0).length"
    page.until(f"{linked} > 2")  # all charts over time show the same part
    page.page.click("[data-choose=light]")
    page.until(f"{gantt}.layout.paper_bgcolor === '{COLOURS['paper'][0]}'")
    assert page.page.evaluate("getComputedStyle(document.body).color") == "rgb(26, 29, 33)"


LLAMA = ullage.to_hf_config_dict(ullage.resolve_model("tinyllama-1.1b")) | {"num_hidden_layers": 3}


def test_files_are_dropped(opened, tmp_path: Path) -> None:
    page = opened()
    page.answered()
    config, profile, bad, large = (tmp_path / name for name in ("mine.json", "box.json", "bad.json", "large.json"))
    config.write_text(json.dumps(LLAMA | {"_name_or_path": "<b>me</b>/tiny<i>"}))
    profile.write_text(ullage.load_profile("h100").model_dump_json(exclude_none=True))
    large.write_text(json.dumps({"x": "y" * 200_000}))
    for text, words in (
        (b"{", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"\x80\x04]", "not a JSON object"),
    ):
        bad.write_bytes(text)
        page.page.set_input_files("#config", bad)
        page.until("!document.getElementById('error').hidden")
        assert words in page.page.inner_text("#error")
    page.page.set_input_files("#profile", large)
    page.until("document.getElementById('error').textContent.includes('at most')")
    bad.write_text('{"model_type": "llama"}')
    page.page.set_input_files("#config", bad)
    page.until("document.getElementById('error').textContent.includes('missing')")
    page.answered(lambda: page.page.set_input_files("#config", config))
    assert page.sentence().startswith("tiny-i ")
    page.answered(lambda: page.page.set_input_files("#profile", profile))
    assert page.asked[-1][1]["config"]["hidden_size"] == LLAMA["hidden_size"]
    other = opened("#" + page.page.url.partition("#")[2])
    other.answered()
    assert other.sentence() == page.sentence()
    assert other.asked[-1] == page.asked[-1]
    page.asks(lambda: page.page.click("#config-given button"))
    assert "config" not in page.asked[-1][1]


def test_a_question_is_cancelled(opened, served) -> None:
    page = opened()
    page.answered()
    page.page.fill("#model", "llama-3-70b")
    page.page.press("#model", "Enter")
    page.until("!document.getElementById('cancel').hidden")
    page.page.click("text=Cheapest machine")  # which takes the place of the question
    page.until("document.getElementById('status').textContent.includes('of 5')")
    page.page.click("#cancel")
    for _ in range(600):
        if not served.jobs.num_running:
            break
        page.page.wait_for_timeout(50)
    assert served.jobs.num_running == 0
    assert page.page.is_hidden("#error")


def test_a_phone_a_keyboard_and_a_screen_reader(opened) -> None:
    page = opened(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True, charts=True)
    page.answered()
    page.until("document.documentElement.dataset.drawn === 'yes'")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 360
    nameless = page.page.evaluate(
        "[...document.querySelectorAll('input, select, button, [role=img], [role=group], section, article')]"
        ".filter(each => !(each.labels?.length || each.getAttribute('aria-label') || each.textContent.trim()))"
        ".map(each => each.outerHTML)"
    )
    assert nameless == []
    assert page.page.get_attribute("#status", "role") == "status"
    assert page.page.get_attribute("#error", "role") == "alert"
    assert page.page.get_attribute("html", "lang") == "en"
    order = []
    words = "fits, tokens/s, cost"
    brief = page.page.locator("#brief")
    assert all(word in brief.inner_text() for word in words.split(", "))
    box = brief.bounding_box()
    assert box["y"] + box["height"] <= 740  # without scrolling
    assert page.page.is_hidden("#optimizer")
    page.page.evaluate("document.body.focus()")
    page.page.focus("#more summary")
    page.page.keyboard.press("Enter")
    page.page.focus(".skip")
    for _ in range(40):
        page.page.keyboard.press("Tab")
        order.append(page.page.evaluate("document.activeElement.id || document.activeElement.className"))
    wanted = ["model", "config", "machine", "gpus", "main", "optimizer", "price", "why"]
    assert [name for name in order if name in wanted][: len(wanted)] == wanted
    page.page.focus("#answer .why")
    page.page.keyboard.press("Enter")
    page.until("document.activeElement.className === 'reasons'")


def test_what_does_not_fit_says_what_would(opened) -> None:
    page = opened("#?model=opt-2.7b&machine=rtx-4090&gpus=1&storage=gpu")
    page.until("document.querySelector('#answer li .why') !== null")
    assert page.page.inner_text("#answer h2") == "It does not fit"
    assert "in GPU memory alone" in page.sentence()
    page.asks(lambda: page.page.click("text=try it >> nth=0"))
    assert page.asked[-1][1]["storage"] == "never"


def test_many_visitors_at_once(opened, served) -> None:
    pages = [opened() for _ in range(10 if ALL else 4)]
    started = served.jobs.num_started
    for page in pages:
        page.answered()
    assert len({page.sentence() for page in pages}) == 1
    assert served.jobs.num_started <= started + 1
    assert all(page.page.is_hidden("#error") for page in pages)
    served.ask("answer", QUICK)
