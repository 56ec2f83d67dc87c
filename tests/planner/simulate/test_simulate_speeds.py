"""What progressive filling promises, checked on the compiled solver and on the reference."""

from fractions import Fraction

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.reference import FluidTask, built, max_min_speeds
from planner.simulate.kernel import simulate

AMOUNTS = st.sampled_from([0.5, 1.0, 2.0, 3.0]) | st.floats(0.01, 100.0)
WEIGHTS = st.sampled_from([1.0, 1.0, 0.125, 2.0]) | st.floats(0.01, 100.0)
NEAR = 1e-9

Running = tuple[list[dict[int, float]], list[list[float]], list[float]]
"""What each running task uses, the capacities, and the weights."""


@st.composite
def running(draw: st.DrawFn) -> Running:
    num_resources = draw(st.integers(1, 5))
    uses = draw(st.lists(st.dictionaries(st.integers(0, num_resources - 1), AMOUNTS), min_size=1, max_size=8))
    capacities = st.lists(AMOUNTS, min_size=1, max_size=4)
    weights = draw(st.lists(WEIGHTS, min_size=len(uses), max_size=len(uses)))
    return uses, [draw(capacities) for _ in range(num_resources)], weights


def solve(uses: list[dict[int, float]], capacity: list[list[float]], weights: list[float]) -> np.ndarray:
    rows = zip(uses, weights, strict=True)
    tasks = [FluidTask(lane, 1.0, uses=use, weight=weight) for lane, (use, weight) in enumerate(rows)]
    return np.array([_speed(tasks, number, capacity) for number in range(len(tasks))])


def _speed(tasks: list[FluidTask], number: int, capacity: list[list[float]]) -> float:
    """Return a task's speed while all run: one that is not delayed ends long before the others do."""
    others = [task if i == number else task._replace(duration_s=1e12) for i, task in enumerate(tasks)]
    return float(1 / simulate(built(others, capacity))[1][number])


@settings(max_examples=examples(300), deadline=None)
@given(running())
def test_solvers_agree(case: Running) -> None:
    uses, capacity, weights = case
    exact_uses = [{r: Fraction(a) for r, a in use.items()} for use in uses]
    exact_capacity = [[Fraction(c) for c in row] for row in capacity]
    exact = max_min_speeds(exact_uses, exact_capacity, [Fraction(w) for w in weights], Fraction)
    expected = np.array([float(speed) for speed in exact])
    np.testing.assert_allclose(solve(uses, capacity, weights), expected, rtol=NEAR, atol=1e-15)
    np.testing.assert_allclose(max_min_speeds(uses, capacity, weights), expected, rtol=NEAR, atol=1e-12)


@settings(max_examples=examples(300), deadline=None)
@given(running())
def test_no_resource_is_overfull_and_every_slow_task_has_a_bottleneck(case: Running) -> None:
    """Feasible; work-conserving; and max-min fair.

    A task below full speed crosses a full resource on which nobody is faster for its weight: Bertsekas and Gallager's
    criterion, which holds of the max-min fair speeds and of no others.
    """
    uses, capacity, weights = case
    check_fair(uses, capacity, weights, solve(uses, capacity, weights))


def check_fair(
    uses: list[dict[int, float]], capacity: list[list[float]], weights: list[float], speeds: np.ndarray
) -> None:
    assert ((speeds >= 0) & (speeds <= 1)).all()
    level = speeds / np.array(weights)
    full = set()
    for r, row in enumerate(capacity):
        users = [i for i, use in enumerate(uses) if r in use]
        allowed = row[min(len(users), len(row)) - 1] if users else 0.0
        used = sum(speeds[i] * uses[i][r] for i in users)
        assert used <= allowed * (1 + NEAR)
        if used >= allowed * (1 - NEAR):
            full.add(r)
    for i, use in enumerate(uses):
        bottlenecks = [r for r in use if r in full]
        highest = [max(level[j] for j, other in enumerate(uses) if r in other) for r in bottlenecks]
        assert speeds[i] == 1.0 or any(level[i] >= h * (1 - NEAR) for h in highest)


def test_the_criterion_refuses_other_speeds() -> None:
    """Idle capacity, too much of it used, shares without regard to weights: each is noticed."""
    uses, capacity, weights = [{0: 1.0}, {0: 1.0}], [[1.0]], [1.0, 3.0]
    check_fair(uses, capacity, weights, np.array([0.25, 0.75]))
    for wrong in ([0.2, 0.6], [0.3, 0.9], [0.5, 0.5], [0.2, 0.8]):
        with pytest.raises(AssertionError):
            check_fair(uses, capacity, weights, np.array(wrong))


@settings(max_examples=examples(100), deadline=None)
@given(running(), st.sampled_from([0.25, 3.0, 1e3]))
def test_only_ratios_of_weights_matter(case: Running, factor: float) -> None:
    uses, capacity, weights = case
    scaled = solve(uses, capacity, [factor * weight for weight in weights])
    np.testing.assert_allclose(scaled, solve(uses, capacity, weights), rtol=NEAR, atol=1e-15)


def test_the_background_gets_its_share_and_what_is_left() -> None:
    # Both would fill the link; the copy in the background has a quarter of the weight.
    full = {0: 10.0}
    np.testing.assert_allclose(solve([full, full], [[10.0]], [1.0, 0.25]), [0.8, 0.2], rtol=1e-15)
    # The foreground is held to 1/2 elsewhere: the background takes the rest of the link, whatever its weight.
    held = {0: 10.0, 1: 2.0}
    np.testing.assert_allclose(solve([held, full], [[10.0], [1.0]], [1.0, 0.25]), [0.5, 0.5], rtol=1e-15)
    # And alone it is as fast as anybody.
    assert solve([full], [[10.0]], [0.25]).tolist() == [1.0]


@pytest.mark.parametrize("seed", range(3))
def test_order_of_tasks_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    uses = [{int(r): float(rng.uniform(0.1, 2)) for r in rng.choice(4, 2, replace=False)} for _ in range(10)]
    order = rng.permutation(len(uses))
    capacity = [[1.0], [2.0], [3.0], [0.5]]
    weights = rng.uniform(0.1, 2, len(uses)).tolist()
    expected = solve(uses, capacity, weights)[order]
    shuffled = solve([uses[i] for i in order], capacity, [weights[i] for i in order])
    np.testing.assert_allclose(shuffled, expected, rtol=1e-12)


def test_only_running_tasks_count() -> None:
    """One runs alone for a second; the other two come after it, and share."""
    after = [FluidTask(lane, 1.0, after=[0], uses={0: 1.0}) for lane in (1, 2)]
    assert simulate(built([FluidTask(0, 1.0, uses={0: 1.0}), *after], [1.0]))[1].tolist() == [1.0, 3.0, 3.0]
