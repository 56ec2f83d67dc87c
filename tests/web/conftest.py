"""One server for all tests of the page, as others reach it, in a thread; its jobs are real processes."""

import asyncio
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import uvicorn

sys.path.insert(0, str(Path(__file__).parent))  # serving.py

from serving import Served

from ullage.web.app import LOCAL, Site, make_app
from ullage.web.jobs import Jobs

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    forked.start_server()  # which jobs are forked from
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = Jobs(num_workers=2, memory_bytes=2 << 30, cpu_s=100)
    app = make_app(Site(LOCAL | {"plans.example.org"}, public=True), jobs)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(),))
    thread.start()
    while not (server.started and jobs.is_warm):
        assert thread.is_alive()
        threading.Event().wait(0.02)
    yield Served(port, jobs, loop)
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("ULLAGE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: install one of {', '.join(NAMES)}, or name one in ULLAGE_BROWSER")
    with playwright.sync_playwright() as driver:
        # Chromium refuses its sandbox to root, as in a container.
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield started
        started.close()
