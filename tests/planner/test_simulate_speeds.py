"""What progressive filling promises, checked on the compiled solver and on the reference."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.simulate import FluidSystem, FluidTask, max_min_speeds, solve_speeds

AMOUNTS = st.sampled_from([0.5, 1.0, 2.0, 3.0]) | st.floats(0.01, 100.0)
NEAR = 1e-9


@st.composite
def running(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[list[float]]]:
    num_resources = draw(st.integers(1, 5))
    uses = draw(st.lists(st.dictionaries(st.integers(0, num_resources - 1), AMOUNTS), min_size=1, max_size=8))
    capacities = st.just([0.0]) | st.lists(AMOUNTS, min_size=1, max_size=4)
    return uses, [draw(capacities) for _ in range(num_resources)]


def solve(uses: list[dict[int, float]], capacity: list[list[float]]) -> np.ndarray:
    tasks = [FluidTask(lane, 1.0, uses=use) for lane, use in enumerate(uses)]
    return solve_speeds(FluidSystem.build(tasks, capacity), range(len(tasks)))


@settings(max_examples=300, deadline=None)
@given(running())
def test_solvers_agree(case: tuple[list[dict[int, float]], list[list[float]]]) -> None:
    uses, capacity = case
    exact_uses = [{r: Fraction(a) for r, a in use.items()} for use in uses]
    exact = max_min_speeds(exact_uses, [[Fraction(c) for c in row] for row in capacity], Fraction)
    expected = np.array([float(speed) for speed in exact])
    np.testing.assert_allclose(solve(uses, capacity), expected, rtol=NEAR, atol=1e-15)
    np.testing.assert_allclose(max_min_speeds(uses, capacity), expected, rtol=NEAR, atol=1e-12)


@settings(max_examples=300, deadline=None)
@given(running())
def test_no_resource_is_overfull_and_every_slow_task_has_a_bottleneck(
    case: tuple[list[dict[int, float]], list[list[float]]],
) -> None:
    """Feasible; work-conserving; and max-min fair.

    A task below full speed crosses a full resource on which nobody is faster: Bertsekas and Gallager's criterion, which
    holds of the max-min fair speeds and of no others.
    """
    uses, capacity = case
    speeds = solve(uses, capacity)
    assert ((speeds >= 0) & (speeds <= 1)).all()
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
        fastest = [max(speeds[j] for j, other in enumerate(uses) if r in other) for r in bottlenecks]
        assert speeds[i] == 1.0 or any(speeds[i] >= f * (1 - NEAR) for f in fastest)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_tasks_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    uses = [{int(r): float(rng.uniform(0.1, 2)) for r in rng.choice(4, 2, replace=False)} for _ in range(10)]
    order = rng.permutation(len(uses))
    capacity = [[1.0], [2.0], [3.0], [0.5]]
    expected = solve(uses, capacity)[order]
    np.testing.assert_allclose(solve([uses[i] for i in order], capacity), expected, rtol=1e-12)


def test_only_running_tasks_count() -> None:
    system = FluidSystem.build([FluidTask(lane, 1.0, uses={0: 1.0}) for lane in range(3)], [1.0])
    assert solve_speeds(system, [0]).tolist() == [1.0]
    assert solve_speeds(system, [2, 1]).tolist() == [0.5, 0.5]
    assert solve_speeds(system, []).tolist() == []
