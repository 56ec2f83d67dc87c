"""The simulator against an exact oracle on random systems, against hand calculation, and against broken rules."""

import dataclasses
import itertools
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.reference import FluidTask, built, max_min_speeds, predecessors, simulate_reference, uses_of
from planner.simulate.kernel import simulate
from planner.simulate.system import FluidSystem

# Round numbers make things happen at the same moment; the others make sure that nothing depends on it.
AMOUNTS = st.sampled_from([0.5, 1.0, 2.0, 3.0]) | st.floats(0.01, 100.0)
TIMES = st.just(0.0) | AMOUNTS
WEIGHTS = st.just(1.0) | st.sampled_from([0.125, 0.5, 2.0, 3.0]) | st.floats(0.01, 100.0)


@st.composite
def systems(draw: st.DrawFn, max_tasks: int = 20) -> FluidSystem:
    num_lanes, num_resources = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    tasks = [
        FluidTask(
            lane=draw(st.integers(0, num_lanes - 1)),
            duration_s=draw(TIMES),
            latency_s=draw(TIMES),
            after=sorted(draw(st.sets(st.integers(max(0, i - 6), i - 1), max_size=3))) if i else (),
            uses=draw(st.dictionaries(st.integers(0, num_resources - 1), AMOUNTS)) if num_resources else {},
            weight=draw(WEIGHTS),
        )
        for i in range(draw(st.integers(0, max_tasks)))
    ]
    return built(tasks, [draw(st.lists(AMOUNTS, min_size=1, max_size=4)) for _ in range(num_resources)])


def assert_same(actual: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    atol = 1e-12 * expected[1].max(initial=0.0)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=atol)


@settings(max_examples=examples(300), deadline=None)
@given(systems())
def test_kernel_equals_exact_reference(system: FluidSystem) -> None:
    assert_same(simulate(system), simulate_reference(system, Fraction))


@settings(max_examples=examples(50), deadline=None)
@given(systems())
def test_reference_in_floats_equals_itself_in_fractions(system: FluidSystem) -> None:
    assert_same(simulate_reference(system), simulate_reference(system, Fraction))


@pytest.mark.part(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_lanes", [8, 60])
def test_kernel_equals_reference_on_many_tasks(seed: int, num_lanes: int) -> None:
    """Rounding does not add up over thousands of events, on a heap of few lanes or of many."""
    system = many_tasks(num_tasks=3000, num_lanes=num_lanes, seed=seed)
    assert_same(simulate(system), simulate_reference(system))


def many_tasks(num_tasks: int, num_lanes: int, seed: int) -> FluidSystem:
    rng = np.random.default_rng(seed)
    tasks = [
        FluidTask(
            lane=int(rng.integers(num_lanes)),
            duration_s=float(rng.choice([0.0, 1.0, rng.exponential()])),
            latency_s=float(rng.choice([0.0, 0.1, rng.exponential(0.1)])),
            after=rng.integers(max(0, i - 20), i, size=2).tolist() if i else (),
            uses={int(r): float(rng.uniform(0.1, 2)) for r in rng.choice(5, size=rng.integers(3), replace=False)},
            weight=float(rng.choice([1.0, 0.125, rng.uniform(0.1, 10)])),
        )
        for i in range(num_tasks)
    ]
    return built(tasks, [1.0, [1.0, 1.5], 0.7, [2.0, 1.8, 1.5], 3.0])


@settings(max_examples=examples(100), deadline=None)
@given(systems())
def test_rules_hold(system: FluidSystem) -> None:
    """FIFO, predecessors and full speed as the limit, read off the result without any simulator."""
    start_s, end_s = simulate(system)
    makespan_s = end_s.max(initial=0.0)
    slack_s = 1e-9 * makespan_s
    assert (end_s - start_s >= system.latency_s + system.duration_s - slack_s).all()
    for lane in range(system.num_lanes):
        for a, b in itertools.pairwise(np.flatnonzero(system.lane == lane)):
            assert start_s[b] >= end_s[a]
    for i in range(system.num_tasks):
        lane_before = np.flatnonzero(system.lane[:i] == system.lane[i])[-1:].tolist()
        waited_for = [0.0, *(end_s[p] for p in predecessors(system, i) + lane_before)]
        assert start_s[i] == max(waited_for)  # neither before them, nor idly after them
    for r in range(len(system.capacity)):
        amount = sum(system.duration_s[i] * uses_of(system, i).get(r, 0.0) for i in range(system.num_tasks))
        assert amount <= system.capacity[r].max() * (makespan_s + slack_s)


@settings(max_examples=examples(100), deadline=None)
@given(systems(), st.sampled_from([(1, 2), (0, 1), (3, 100)]))
def test_idle_lanes_and_resources_change_nothing(system: FluidSystem, numbers: tuple[int, int]) -> None:
    """Tasks on lanes 0, 1, 2 take what they take on lanes 3, 103, 203, with resources spread out likewise."""
    first, stride = numbers
    capacity = np.ones((first + stride * len(system.capacity), system.capacity.shape[1]))
    capacity[first::stride] = system.capacity
    spread = dataclasses.replace(
        system,
        lane=first + stride * system.lane,
        use_resource=first + stride * system.use_resource,
        capacity=capacity,
    )
    assert simulate(spread)[1].tobytes() == simulate(system)[1].tobytes()


@settings(max_examples=examples(100), deadline=None)
@given(systems())
def test_no_work_is_lost_and_no_capacity_is_left_idle(system: FluidSystem) -> None:
    """Work-conserving over time: between two moments, speeds are those of progressive filling of who is running.

    Read off the result: who is running follows from starts, latencies and ends; their speeds then make up the work.
    """
    start_s, end_s = simulate(system)
    runs_s, capacity = start_s + system.latency_s, system.capacity.tolist()
    moments = np.unique(np.concatenate([runs_s, end_s, [0.0]]))
    done_s = np.zeros(system.num_tasks)
    for a, b in itertools.pairwise(moments.tolist()):
        running = np.flatnonzero((runs_s <= a) & (end_s >= b)).tolist()
        uses, weights = [uses_of(system, i) for i in running], system.weight[running].tolist()
        done_s[running] += (b - a) * np.array(max_min_speeds(uses, capacity, weights))
    np.testing.assert_allclose(done_s, system.duration_s, rtol=1e-6, atol=1e-9 * (1 + end_s.max(initial=0.0)))


@settings(max_examples=examples(30), deadline=None)
@given(systems())
def test_same_input_same_bits(system: FluidSystem) -> None:
    for first_s, second_s in zip(simulate(system), simulate(system), strict=True):
        assert first_s.tobytes() == second_s.tobytes()


def end_s(tasks: list[FluidTask], capacity: list[float | list[float]]) -> list[float]:
    system = built(tasks, capacity)
    times_s = simulate(system)
    assert_same(times_s, simulate_reference(system, Fraction))
    return times_s[1].tolist()


def test_two_copies_share_a_link() -> None:
    # 10 and 30 units over a link of 10/s: both at 5/s until 2 s, then the second has 20 left at 10/s.
    copy = {0: 10.0}
    assert end_s([FluidTask(0, 1.0, uses=copy), FluidTask(1, 3.0, uses=copy)], [10.0]) == [2.0, 4.0]


def test_latency_comes_first_and_uses_nothing() -> None:
    # The first runs alone until 1 s, when the second's latency is over; then both at half speed.
    tasks = [FluidTask(0, 2.0, uses={0: 1.0}), FluidTask(1, 2.0, latency_s=1.0, uses={0: 1.0})]
    assert end_s(tasks, [1.0]) == [3.0, 4.0]


def test_lane_is_fifo_even_if_a_later_task_could_go() -> None:
    tasks = [FluidTask(0, 5.0), FluidTask(1, 1.0, after=[0]), FluidTask(1, 1.0)]
    assert end_s(tasks, []) == [5.0, 6.0, 7.0]


def test_shares_are_fair_in_speed_not_in_amount() -> None:
    # At equal speed s the link carries s * (6 + 3) = 6: s = 2/3. The second ends at 1.5 s, the first has 1 s left.
    assert end_s([FluidTask(0, 2.0, uses={0: 6.0}), FluidTask(1, 1.0, uses={0: 3.0})], [6.0]) == [2.5, 1.5]


def test_split_duplex() -> None:
    # Each direction carries 1/s, both together 1.5/s: 0.75 each until 2/0.75 = 8/3 s, then the other alone.
    down, up = {0: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0}
    tasks = [FluidTask(0, 2.0, uses=down), FluidTask(1, 4.0, uses=up)]
    assert end_s(tasks, [1.0, 1.0, 1.5]) == pytest.approx([8 / 3, 14 / 3], rel=1e-15)


DUPLEX = [10.0, 8.0, 12.0]  # down, up, both together
DOWN, UP = {0: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0}


@pytest.mark.parametrize(
    ("num_down", "num_up", "rate", "each"),
    [
        (1, 0, 20.0, 10.0),  # alone, each direction has its own capacity
        (0, 1, 20.0, 8.0),
        (2, 0, 20.0, 5.0),
        (1, 1, 20.0, 6.0),  # both at once share the sum
        (2, 1, 20.0, 4.0),
        (1, 1, 5.0, 5.0),  # and hold nobody back who wants less
    ],
)
def test_duplex_link(num_down: int, num_up: int, rate: float, each: float) -> None:
    """Copies of 40 units that take ``each`` per second."""
    directions = [DOWN] * num_down + [UP] * num_up
    tasks = [
        FluidTask(lane, 40.0 / rate, uses={r: rate * a for r, a in uses.items()})
        for lane, uses in enumerate(directions)
    ]
    assert end_s(tasks, DUPLEX) == pytest.approx([40.0 / each] * len(tasks), rel=1e-15)


def test_a_direction_that_is_full_leaves_the_rest_of_the_sum_to_the_other() -> None:
    # Three up share 8/s: 8/3 each. The sum of 12/s leaves 4/s to the one down: all rise to 8/3 first, then it alone.
    tasks = [FluidTask(0, 4.0, uses={0: 20.0, 2: 20.0})]
    tasks += [FluidTask(lane, 1.0, uses={1: 20.0, 2: 20.0}) for lane in (1, 2, 3)]
    # Up: 20 units at 8/3 each end at 7.5 s; down: 30 of its 80 by then, the other 50 at 10/s.
    assert end_s(tasks, [10.0, 8.0, 12.0]) == pytest.approx([12.5, 7.5, 7.5, 7.5], rel=1e-15)


@pytest.mark.parametrize("row", [[4.0, 6.0, 7.0], [6.0, 5.0, 3.0]])  # queue depth helps a disk; streams disturb DRAM
def test_capacity_rises_or_falls_with_the_number_of_users(row: list[float]) -> None:
    for count in range(1, 6):
        tasks = [FluidTask(lane, 1.0, uses={0: 10.0}) for lane in range(count)]
        expected = 10.0 * count / row[min(count, len(row)) - 1]
        assert end_s(tasks, [row]) == pytest.approx([expected] * count, rel=1e-15)


def test_a_user_more_may_slow_or_speed_up_the_others() -> None:
    # A copy of 2 s alone; a second one comes after 1 s. Falling: 1 to 0.8 for both, so 0.4 each. Rising: 1 to 2.
    tasks = [FluidTask(0, 2.0, uses={0: 1.0}), FluidTask(1, 2.0, latency_s=1.0, uses={0: 1.0})]
    assert end_s(tasks, [[1.0, 0.8]]) == pytest.approx([3.5, 4.5], rel=1e-15)
    assert end_s(tasks, [[1.0, 2.0]]) == [2.0, 3.0]


def test_weights_share_a_link_and_yield_it() -> None:
    # A checkpoint copy of weight 1/4 beside a gradient copy: 1/5 of the link until the gradient is out, then all of it.
    copy = {0: 10.0}
    tasks = [FluidTask(0, 4.0, uses=copy), FluidTask(1, 3.0, uses=copy, weight=0.25)]
    assert end_s(tasks, [10.0]) == pytest.approx([5.0, 7.0], rel=1e-15)


def test_what_one_cannot_use_is_left_to_others() -> None:
    # Resource 1 holds the first to 1/4; the second takes the remaining 3/4 of resource 0.
    tasks = [FluidTask(0, 1.0, uses={0: 1.0, 1: 4.0}), FluidTask(1, 3.0, uses={0: 1.0})]
    assert end_s(tasks, [1.0, 1.0]) == [4.0, 4.0]


def test_capacity_depends_on_the_number_of_users() -> None:
    # Alone 2/s; two get 3/s together, three (and more) 1.5/s together: 0.5 each.
    tasks = [FluidTask(lane, 1.0, uses={0: 2.0}) for lane in range(3)]
    assert end_s(tasks[:1], [[2.0, 3.0, 1.5]]) == [1.0]
    assert end_s(tasks[:2], [[2.0, 3.0, 1.5]]) == pytest.approx([4 / 3] * 2, rel=1e-15)
    assert end_s(tasks, [[2.0, 3.0, 1.5]]) == [4.0] * 3


def test_unequal_users_return_to_full_speed() -> None:
    # Copies of 1 s arrive at 0, 0.5 and 1 s: speeds 1, 1/2, 1/3 as they pile up.
    tasks = [FluidTask(lane, 1.0, latency_s=lane / 2, uses={0: 1.0}) for lane in range(3)]
    assert end_s(tasks, [1.0]) == pytest.approx([1.75, 2.75, 3.0], rel=1e-15)


def test_empty_tasks_end_at_once_in_chains() -> None:
    tasks = [
        FluidTask(1, 0.0),
        FluidTask(0, 0.0, after=[0]),
        FluidTask(1, 0.0, after=[1]),
        FluidTask(0, 1.0, after=[2]),
    ]
    assert end_s(tasks, []) == [0.0, 0.0, 0.0, 1.0]
    assert end_s([], []) == []


def test_chain_of_a_million_tasks() -> None:
    count = 1_000_000
    pointer = np.arange(count + 1)
    system = FluidSystem(
        lane=np.arange(count) % 4,
        latency_s=np.zeros(count),
        duration_s=np.ones(count),
        weight=np.ones(count),
        pred_ptr=np.maximum(pointer - 1, 0),
        pred=np.arange(count - 1),
        use_ptr=pointer,
        use_resource=np.zeros(count),
        use_rate=np.ones(count),
        capacity=np.ones((1, 1)),
    )
    assert simulate(system)[1].max() == count


# One system in which every rule matters, and what becomes of it when a rule is forgotten.
TASKS = [
    FluidTask(0, 2.0, uses={0: 1.0}),
    FluidTask(1, 3.0, latency_s=0.5, uses={0: 1.0}, weight=0.5),
    FluidTask(1, 1.0),
    FluidTask(2, 1.0, after=[0], uses={0: 1.0}),
    FluidTask(0, 1.0, after=[2]),
]
CAPACITY: list[float | list[float]] = [[1.0, 1.2]]
BROKEN = {
    "FIFO": ([task._replace(lane=i) for i, task in enumerate(TASKS)], CAPACITY),
    "predecessors": ([task._replace(after=()) for task in TASKS], CAPACITY),
    "latency": ([task._replace(latency_s=0.0) for task in TASKS], CAPACITY),
    "latency is not work": (
        [task._replace(latency_s=0.0, duration_s=task.latency_s + task.duration_s) for task in TASKS],
        CAPACITY,
    ),
    "weights": ([task._replace(weight=1.0) for task in TASKS], CAPACITY),
    "sharing": ([task._replace(uses={}) for task in TASKS], CAPACITY),
    "number of users": (TASKS, [1.0]),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_forgetting_a_rule_shows(rule: str) -> None:
    """The comparison with the reference can tell a simulator that keeps all rules from one that forgets one."""
    expected = simulate_reference(built(TASKS, CAPACITY))
    right, wrong = simulate(built(TASKS, CAPACITY)), simulate(built(*BROKEN[rule]))
    assert_same(right, expected)
    with pytest.raises(AssertionError):
        assert_same(wrong, expected)


@pytest.mark.parametrize(
    ("tasks", "capacity"),
    [
        ([FluidTask(0, -1.0)], []),
        ([FluidTask(0, float("nan"))], []),
        ([FluidTask(0, 1.0, float("inf"))], []),
        ([FluidTask(-1, 1.0)], []),
        ([FluidTask(0, 1.0, weight=0.0)], []),
        ([FluidTask(0, 1.0, after=[7])], []),
        ([FluidTask(0, 1.0, after=[-1])], []),
        ([FluidTask(0, 1.0, after=[0])], []),  # a cycle
        ([FluidTask(0, 1.0, after=[1]), FluidTask(0, 1.0)], []),  # by the lane
        ([FluidTask(0, 1.0, uses={1: 1.0})], [1.0]),
        ([FluidTask(0, 1.0, uses={0: -1.0})], [1.0]),
        ([], [-1.0]),
        ([], [0.0]),
        ([], [1.0, float("inf")]),
    ],
)
def test_the_kernel_gets_no_wrong_input(tasks: list[FluidTask], capacity: list) -> None:
    with pytest.raises(AssertionError):
        built(tasks, capacity)


@pytest.mark.parametrize(
    "change",
    [
        {"duration_s": np.ones(3)},
        {"weight": np.ones(3)},
        {"use_ptr": np.array([0, 2, 1])},
        {"use_rate": np.ones(3)},
        {"pred_ptr": np.array([0, 0, 1])},
        {"capacity": np.ones(2)},
        {"use_resource": np.array([1, 0])},
        {"use_resource": np.array([1, 1])},
    ],
)
def test_arrays_must_fit_together(change: dict[str, np.ndarray]) -> None:
    tasks = [FluidTask(0, 1.0, uses={0: 1.0, 1: 1.0}), FluidTask(0, 1.0)]
    system = built(tasks, [1.0, 1.0])
    with pytest.raises(AssertionError):
        dataclasses.replace(system, **change)


def test_arrays_cannot_be_changed_behind_its_back() -> None:
    mine = np.ones(1)
    system = dataclasses.replace(built([FluidTask(0, 2.0)]), duration_s=mine)
    with pytest.raises(ValueError, match="read-only"):
        system.duration_s[0] = -1.0
    mine[0] = 3.0  # and the caller's own array stays writable


def test_llvm_is_only_loaded_when_something_is_simulated() -> None:
    code = "import sys, planner.simulate; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
