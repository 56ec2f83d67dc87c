"""The same small models on a CUDA device. Skipped where there is none; ``benchmarks/gpu/run.sh`` runs them."""

import pytest
import torch
from training import Task, decide, prepare, reference, train, uniform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TASK = Task(family="llama", iterations=12)
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


@pytest.mark.parametrize(("params", "place", "activations"), PLACES)
def test_losses_follow_the_reference(params: str, place: str, activations: str) -> None:
    """bf16 kernels of two devices differ in the last bit of every product, so curves agree and bits do not."""
    model, optimizer = prepare(TASK, decide(TASK, uniform(params, place, activations)), device="cuda", record=True)
    with optimizer.session as session:
        seen = train(TASK, model, optimizer)
        timeline = session.timeline()
    assert seen == pytest.approx(reference(TASK)[0], rel=0.02)
    assert timeline.num_iterations == TASK.iterations
    assert timeline.makespan_s() > 0


def test_places_agree_with_each_other() -> None:
    """The host's kernel and the device's round differently, by far less than training moves."""
    curves = []
    for params, place, activations in PLACES:
        model, optimizer = prepare(TASK, decide(TASK, uniform(params, place, activations)), device="cuda")
        with optimizer.session:
            curves.append(train(TASK, model, optimizer))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0.01)
