"""The same small models on a CUDA device, or on the virtual one. ``benchmarks/gpu/run.sh`` runs them on the former."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import Task, decide, prepare, reference, train, uniform

from executor.cuda import Clock

pytestmark = pytest.mark.usefixtures("gpu")

# Products of two devices differ in their last bit, and training makes more of that with every step: few are compared.
ITERATIONS = 4
TOLERANCES = [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)]
PLACES = [
    ("gpu", "gpu", "keep"),
    ("gpu", "cpu", "keep"),
    ("gpu", "stream", "recompute"),
    ("host", "cpu", "recompute"),
    ("host", "stream", "keep"),
    ("gpu", "gpu", "offload"),
    ("host", "cpu", "offload"),
    ("nvme", "nvme", "offload-nvme"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize(("params", "place", "activations"), PLACES)
def test_losses_and_norms_follow_the_reference(params, place, activations, dtype, tolerance):
    task = Task("llama", dtype, iterations=ITERATIONS)
    model, optimizer = prepare(task, decide(task, uniform(params, place, activations)), device="cuda", record=True)
    with optimizer.session as session:
        seen = train(task, model, optimizer)
        timeline = session.timeline()
    assert seen == pytest.approx(reference(task)[0], rel=tolerance)
    assert timeline.num_iterations == task.iterations
    assert timeline.makespan_s() > 0


def test_places_agree_with_each_other():
    """The host's kernel and the device's round differently, by far less than training moves."""
    task = Task("llama", iterations=ITERATIONS)
    curves = []
    for params, place, activations in PLACES:
        model, optimizer = prepare(task, decide(task, uniform(params, place, activations)), device="cuda")
        with optimizer.session:
            curves.append(train(task, model, optimizer))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0.01)


class AtTime:
    """An event as CUDA tells of it."""

    def __init__(self, time_s):
        self.time_s = time_s

    def seconds_to(self, other):
        return float(np.float32((other.time_s - self.time_s) * 1e3)) / 1e3


@given(st.lists(st.floats(0, 60), min_size=1, max_size=300), st.booleans())
def test_times_are_as_exact_after_hours(gaps_s, backwards):
    """A second look, from the end or the beginning, sees the same."""
    times_s = [float(time_s) for time_s in np.cumsum([0.5, *gaps_s])]
    clock = Clock(AtTime(0.0), 5.0)
    found_s = [clock.seconds(AtTime(time_s)) for time_s in times_s]
    error_s = [found - time_s - 5.0 for found, time_s in zip(found_s, times_s, strict=True)]
    assert max(map(abs, np.diff([0, *error_s]))) < 3e-6
    order = range(len(times_s))[:: -1 if backwards else 1]
    assert [clock.seconds(AtTime(times_s[i])) for i in order] == pytest.approx([found_s[i] for i in order], abs=3e-6)
