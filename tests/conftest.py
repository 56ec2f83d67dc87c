"""For all tests: their examples (the same everywhere in ``make test``, new ones in ``make fuzz``), and Ctrl-C."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

sys.path.insert(0, str(Path(__file__).parent))  # amount.py, special_files.py

from amount import divided, examples, short_searches

# A developer's own profile is the default of --hardware: no test sees it, nor does any process that a test starts.
_HOME = tempfile.TemporaryDirectory(prefix="ullage-home-")  # removed when the tests end
os.environ["ULLAGE_HOME"] = _HOME.name
os.environ["HF_DATASETS_CACHE"] = str(Path(_HOME.name) / "datasets")  # tokens of files of data
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads leave the core to the tests beside these

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A change is judged by the same examples on every machine; what nobody thought of is looked for at leisure.
settings.register_profile("same", derandomize=True, deadline=None, max_examples=examples(100))
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same")
# Hypothesis also draws constants of local source files; which files are local depends on the path of the checkout.
_of_local_files = getattr(providers, "_get_local_constants", None)  # private: other versions may not have it
if _of_local_files is not None:
    providers._get_local_constants = lambda: (
        providers._local_constants if settings.default.derandomize else _of_local_files()
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to ``make test-all`` what is marked so."""
    items[:], left = divided(items)
    config.hook.pytest_deselected(items=left)


gc.disable()  # until all is imported: two million objects, which stay


def pytest_collection_finish() -> None:
    """Let garbage collections pass over what has been imported."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(200_000, 20, 100)  # plans and models make and keep many objects, and few of them are garbage


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let them pass over what each file leaves: caches, and what was imported late. Trainers collect after each run."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def short_plans():
    """Plans are found quickly. Files and folders that test searches have a fixture of this name that does nothing."""
    with short_searches():
        yield


@pytest.fixture(scope="session")
def processes():
    """Four processes for all tests of ranks, as starting them takes seconds."""
    yield from pool_of(4)


@pytest.fixture(scope="module")
def eight_processes():
    """Eight processes for the tests of a file."""
    yield from pool_of(8)


def pool_of(size):
    """Yield processes that stay from test to test, and end them."""
    from rank_pool import Processes  # noqa: PLC0415 - of the executor's tests, whose folder others add to the path

    pool = Processes(size)
    pool.wait_until_ready()
    yield pool
    pool.close()
