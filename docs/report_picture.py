"""Draw the picture of a report in the README: ``python docs/report_picture.py``.

It is of the committed run of the demo, in a Chromium of the PATH or of ``ULLAGE_BROWSER``, as in the tests.
"""

import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from ullage.main import main

HERE = Path(__file__).parent
RUN = HERE.parent / "benchmarks" / "results" / "demo_run.json"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SHOWN_WIDTH = 1080, 1180, 1300
COLUMNS = ("#part0", "#part0-timeline")  # what the left and the right half begin with


def draw(report: Path) -> None:
    """Put the first screen of a report beside its charts over time."""
    browser = os.environ.get("ULLAGE_BROWSER") or next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        page = started.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-drawn=yes]", state="attached")
        page.add_style_tag(content=".top {display: none} html {scroll-behavior: auto}")
        picture = Image.new("RGB", (2 * WIDTH, HEIGHT), "white")
        for number, begin in enumerate(COLUMNS):
            top = page.evaluate(f"document.querySelector('{begin}').getBoundingClientRect().top + window.scrollY")
            clip = {"x": 0, "y": top, "width": WIDTH, "height": HEIGHT}
            picture.paste(Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))), (number * WIDTH, 0))
        started.close()
    picture = picture.resize((SHOWN_WIDTH, round(SHOWN_WIDTH * HEIGHT / (2 * WIDTH))), Image.Resampling.LANCZOS)
    picture.save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        if code := main(["report", str(RUN), "--output", str(path)]):
            raise SystemExit(code)
        draw(path)
