"""How far a step may be from the same one in memory where sums are in another order."""

import pytest
import torch
from rank_programs import trained
from rank_references import reference
from training import Task, decide, make_model, weights


def one_step(family: str, dtype: torch.dtype) -> Task:
    """Return a step of plain SGD: what has become of weights is their gradient."""
    return Task(family, dtype, max_norm=None, iterations=1, schedule=False, optimizer="sgd-plain")


def check_one_step(
    pool, family: str, dtype: torch.dtype, choose, degrees: tuple[int, int, int, int], **further
) -> None:
    """Compare a step of ranks, by tensor, data, expert and context degree, with that of one process."""
    tensor, data, expert, context = degrees
    task = one_step(family, dtype)
    decisions = decide(
        task,
        choose,
        tensor_parallel=tensor,
        data_parallel=data,
        expert_parallel=expert,
        context_parallel=context,
        **further,
    )
    results = pool.call(tensor * data, trained, task, decisions)
    assert_same_step(task, decisions, results, num_parts=tensor * data)


def assert_same_step(task: Task, decisions, results, num_parts: int) -> None:
    """Compare with one process what :func:`rank_programs.trained` gave for :func:`one_step`.

    A product in another order is off by at most ``n u`` of the sum of its terms' sizes, with ``n`` terms and the unit
    roundoff ``u`` (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1): fp32, 200 terms. In bf16 terms
    are added up in fp32, and each of ``num_parts`` parts and of their sums is rounded. Through 3 layers an iteration
    has 26 products, one behind the other. What is in theory 0 (the gradient of a key's bias) has the error of its
    terms, so that a part of the whole gradient's size is allowed too.
    """
    losses, expected = reference(task, decisions.num_readers, decisions)
    fp32 = task.dtype is torch.float32
    error = 200 * 2**-24 if fp32 else (2 * num_parts - 1) * 2**-9
    for rank, (seen, final) in enumerate(results):
        assert seen == pytest.approx(
            losses[rank // (decisions.tensor_parallel * decisions.context_parallel)], rel=3 * error
        )
        assert all(final[name].tobytes() == results[0][1][name].tobytes() for name in expected), "ranks agree in all"
    first, final = weights(make_model(task)), tensors(results[0][1], expected)
    change = {name: (expected[name] - first[name]).float() for name in expected}
    everything = torch.cat([values.flatten() for values in change.values()]).norm()
    for name, values in change.items():
        rounding = first[name].float().norm() * (0 if fp32 else 2**-8)  # of the weight itself
        off = (final[name].float() - expected[name].float()).norm()
        assert off <= 26 * error * values.norm() + error * everything + rounding, (name, float(off))


def tensors(values, like):
    """Return what a rank gave, as tensors."""
    return {n: torch.from_numpy(values[n].copy()).view(w.dtype).view(w.shape) for n, w in like.items()}
