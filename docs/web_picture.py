"""Draw the picture of the page in the README: ``python docs/web_picture.py``.

It is of the page's first answer, in a Chromium of the PATH or of ``ULLAGE_BROWSER``, as in the tests.
"""

import io
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SHOWN_WIDTH = 1160, 1130, 1000


def draw(address: str) -> None:
    """Save the first screen of the page, when its answer is there."""
    browser = os.environ.get("ULLAGE_BROWSER") or next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        page = started.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(address)
        page.wait_for_selector("html[data-answered]", state="attached", timeout=600_000)
        page.reload()  # so that the picture does not depend on how long this machine took
        page.wait_for_selector("html[data-answered]", state="attached")
        page.wait_for_selector("html[data-drawn=yes]", state="attached")
        page.wait_for_timeout(500)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        started.close()
    picture = picture.resize((SHOWN_WIDTH, round(SHOWN_WIDTH * HEIGHT / WIDTH)), Image.Resampling.LANCZOS)
    picture.quantize(96).save(HERE / "web.png", optimize=True)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "ullage", "web", "--port", str(port)], stderr=subprocess.PIPE)
    try:
        assert server.stderr
        server.stderr.readline()  # it is listening
        draw(f"http://localhost:{port}/")
    finally:
        server.terminate()
        server.wait()
