"""A batch divided among GPUs of several kinds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.registry import load_profile
from planner.costs.scalable import all_scalables, scaled
from planner.models.parameters import num_parameters
from planner.models.registry import resolve_model
from ullage.whatif.design import Space
from ullage.whatif.questions import answer, study
from ullage.whatif.running.runner import Evaluator
from ullage.whatif.running.store import Store
from ullage.whatif.study import Study, StudyRequest
from ullage.whatif.unlike import _shares, least_longest

SLOWER = 3


def divided(model: str, machines: str, gpus: str, batch: int | None) -> Study:
    fixed = {"model": model} | ({} if batch is None else {"global_batch": str(batch)})
    request = StudyRequest(set=fixed, sweep={"hardware": (machines,), "gpus": (gpus,)}, question="unlike")
    with Store(None) as store:
        return answer(Evaluator(Space(request, "fit"), store))


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> str:
    """An A100 whose device takes three times as long for everything."""
    profile = load_profile("a100-80")
    for scalable in all_scalables(profile):
        if scalable.key.startswith("device-") and scalable.key != "device-memory":
            profile = scaled(profile, scalable, 1 / SLOWER)
        elif scalable.key == "issue":
            profile = scaled(profile, scalable, SLOWER)
    path = tmp_path_factory.mktemp("slow") / "slow.json"
    path.write_text(profile.model_copy(update={"name": "slow"}).model_dump_json(exclude_none=True))
    return str(path)


def shares_of(study: Study) -> list[int]:
    return [study.points[at].settings["global_batch"] for at in study.answer.points]


def test_no_other_division_is_faster(tiny, slow):
    total = 24
    found = divided(tiny, f"a100-80,{slow}", "2,1", total)
    fast_share, slow_share = shares_of(found)
    assert fast_share + slow_share == total
    machines = {
        f"{share} on {count}": (name, count, share)
        for name, count in (("a100-80", 2), (slow, 1))
        for share in range(count, total, count)
    }
    planned = {key: time_of(tiny, *each) for key, each in machines.items()}
    best_s = min(max(planned[f"{share} on 2"], planned[f"{total - share} on 1"]) for share in range(2, total, 2))
    slowest_s = max(found.points[at].figures.iteration_s for at in found.answer.points)
    assert slowest_s <= 1.05 * best_s
    assert found.answer.bound_s <= best_s
    assert found.answer.iteration_s > slowest_s, "and the exchange of gradients"
    assert "no division is faster" in found.answer.words[1]
    assert f"{fast_share} on 2 x a100-80; {slow_share} on 1 x " in found.answer.words[0]


def time_of(model: str, machine: str, gpus: int, batch: int) -> float:
    found = study(model=model, hardware=machine, gpus=gpus, global_batch=batch, effort="fit")
    return found.points[0].figures.iteration_s


def test_like_devices_have_equal_shares(tiny):
    found = divided(tiny, "a100-80,a100-80", "2,2", 16)
    assert shares_of(found) == [8, 8]
    assert "2 x a100-80 alone" in " ".join(found.answer.words)
    both = found.points[0].figures.iteration_s
    # Gradients of all weights cross the network once each way, two devices' parts at a time.
    network = load_profile("a100-80").inter_node
    exchange_s = 2 * num_parameters(resolve_model(tiny)) / 2 / (2 * network.bytes_per_s.value) + network.latency_s.value
    assert found.answer.iteration_s == pytest.approx(both + 2 * exchange_s)


@pytest.mark.parametrize(
    ("machines", "gpus", "batch", "words"),
    [
        ("a100-80", "2", 16, "two or more kinds"),
        ("a100-80,h100", "2,2,2", 16, "two or more kinds"),
        ("a100-80,h100", "2,2", None, "--global-batch"),
        ("a100-80,h100", "4,2", 33, "larger multiple of 2"),
        ("a100-80,rtx-4090", "1,1", 16, "no network between nodes"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(tiny, machines, gpus, batch, words):
    with pytest.raises(ValueError, match=words) as refused:
        divided(tiny, machines, gpus, batch)
    assert "\n" not in str(refused.value)


@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_the_bound_is_the_least_longest_of_all_divisions(times, data):
    tables = [dict(enumerate(of_kind, start=1)) for of_kind in times]
    total = sum(data.draw(st.integers(1, len(table))) for table in tables)
    found_s, shares = least_longest(tables, total)
    ways = itertools.product(*(table.items() for table in tables))
    expected = min(max(time_s for _, time_s in way) for way in ways if sum(share for share, _ in way) == total)
    assert found_s == expected
    assert sum(shares) == total
    assert max(table[share] for table, share in zip(tables, shares, strict=True)) == found_s


@pytest.mark.parametrize(("count", "most"), [(1, 64), (1, 65), (3, 5000), (8, 8)])
def test_shares_are_whole_and_few(count, most):
    found = _shares(("a100-80", count), most)
    assert 0 < len(found) <= 64
    assert all(share % count == 0 and share <= most for share in found)


def test_a_bound_over_steps_says_so(tiny, monkeypatch):
    monkeypatch.setattr("ullage.whatif.unlike._MOST_SHARES", 4)
    found = divided(tiny, "a100-80,a100-80", "1,1", 16)
    assert found.answer.words[1].startswith("no division in steps of 4 and 4 sequences is faster")
