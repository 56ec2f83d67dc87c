"""The RNG state of torch, Python and NumPy, as plain JSON."""

import base64
import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Return the state of all random number generators that training may use, as plain JSON."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - users' code may use it
    version, internal, gauss = random.getstate()
    state = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the state that :func:`rng_state` returned."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # the state is of another kind of device
            torch.cuda.set_rng_state(_tensor(state["cuda"]))


@contextlib.contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Restore the RNG state at the end, on all devices."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users' code may use it
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _text(values: torch.Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
