"""The same small models on a CUDA device, or on the virtual one. ``benchmarks/gpu/run.sh`` runs them on the former."""

import pytest
import torch
from training import Task, decide, prepare, reference, train, uniform

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
