import itertools
import json
import os

import pytest

from planner.checkpoints.choosing import choose_checkpoints
from ullage.rivals import make_plan
from ullage.whatif.design import Space
from ullage.whatif.running import point
from ullage.whatif.running.point import digest_of, plan_point
from ullage.whatif.running.runner import Evaluator, run_study
from ullage.whatif.running.store import Store
from ullage.whatif.running.workers import in_processes, in_this_process
from ullage.whatif.study import Study, StudyRequest, load_study


def space(tiny: str, **options: object) -> Space:
    given = {"model": tiny, "hardware": "a100-80", **options.pop("set", {})}
    return Space(StudyRequest(set=given, **options))


def study(wanted: Space, path, runner=in_this_process) -> Study:
    with Store(path) as store:
        return run_study(Evaluator(wanted, store, runner=runner))


def test_a_point_is_what_plan_finds(tiny):
    wanted = space(tiny, set={"pcie": "0.5x", "seq_len": "64", "optimizer": "lion", "clip": "false"})
    case = wanted.case({})
    plan = make_plan(case.request)
    assert (plan.decisions.optimizer, plan.decisions.clip, plan.seq_len) == ("lion", False, 64)
    result = plan_point(case.request, "certify")
    assert result.status == "fits"
    figures, seen = result.figures, plan.prediction
    assert (figures.iteration_s, figures.tokens_per_s) == (seen.iteration_s, seen.tokens_per_s)
    assert figures.num_simulations == plan.num_simulations
    assert figures.memory == seen.memory
    assert figures.engines == {row.name: row.iteration_s if row.fits else None for row in plan.engines}
    assert figures.bound_s == plan.certificate.bound_s
    assert figures.gap == plan.certificate.gap(seen.iteration_s)
    assert figures.critical_s == seen.critical_s
    bare = plan_point(case.request, "plan")
    assert bare.figures == figures.model_copy(update={"bound_s": None, "gap": None})


def test_checkpoints_of_a_point_are_those_that_plan_chooses(tiny):
    requested = {"gpus": "2", "mtbf": "memory=10m,nvme=1h", "max_lost_work": "5m"}
    case = space(tiny, set=requested).case({})
    chosen = choose_checkpoints(make_plan(case.request), case.checkpoints)
    assert case.checkpoints.mtbf_s == {"memory": 600.0, "nvme": 3600.0}
    assert case.checkpoints.max_lost_s == 300.0
    figures = plan_point(case.request, "plan", case.checkpoints).figures
    found = figures.checkpoints
    assert found.every == {level.level: level.every for level in chosen.levels}
    assert (found.waste, found.overhead, found.most_lost_s) == (chosen.waste, chosen.overhead, chosen.most_lost_s)
    assert 0 < found.waste < 1
    assert figures.goodput_tokens_per_s == figures.tokens_per_s * (1 - found.waste)
    without = plan_point(case.request, "plan").figures
    assert without == figures.model_copy(update={"checkpoints": None})
    assert without.goodput_tokens_per_s == without.tokens_per_s


def test_the_rarer_failures_are_the_more_is_left_of_the_time(tiny, tmp_path):
    found = study(space(tiny, sweep={"mtbf": ("2m,1h,1d",), "clip": ("true,false",)}), tmp_path / "s.jsonl")
    by = {(p.settings["mtbf"], p.settings["clip"]): p.figures.goodput_tokens_per_s for p in found.points}
    for clip in (True, False):
        assert by["2m", clip] < by["1h", clip] < by["1d", clip]
    never = study(space(tiny, set={"mtbf": "1s"}), tmp_path / "never.jsonl").points[0].result
    assert (never.status, "longer mtbf" in never.reason) == ("refused", True)
    alone = space(tiny, set={"max_lost_work": "5m"}).case({})
    assert "--mtbf" in alone.refused.reason


def test_points_that_differ_only_in_rates_follow_one_another(tiny, tmp_path):
    wanted = space(tiny, sweep={"pcie": ("1x,2x,4x",), "device.memory_bytes": ("40GB,80GB",), "gpus": ("1,2",)})
    seen = []

    def runner(points, effort):
        for each in points:
            seen.append((each.request.hardware.device.memory_bytes.value, each.request.num_devices))
            yield from in_this_process([each], effort)

    found = study(wanted, tmp_path / "s.jsonl", runner)
    assert [len(list(group)) for _, group in itertools.groupby(seen)] == [3] * 4
    requested = [case.settings for case in wanted.cases()]
    assert [point.settings for point in found.points] == requested, (
        "what is told of them keeps the order of the question"
    )


def test_an_interruption_counts_what_is_in_the_file(tiny, tmp_path, monkeypatch):
    """Whenever it comes: here between a point's line and its being counted."""
    sync, calls = os.fsync, []

    def interrupted(file):
        sync(file)
        calls.append(file)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; 2 of 3 points are stored"):
        study(space(tiny, sweep={"pcie": ("1x,2x,4x",)}), tmp_path / "s.jsonl")
    assert (tmp_path / "s.jsonl").read_bytes().count(b"\n") == 2


def test_results_do_not_depend_on_order_or_processes(tiny, tmp_path):
    wanted = space(tiny, sweep={"pcie": ("1x,4x",), "device.memory_bytes": ("40GB,80GB",)})
    one = study(wanted, tmp_path / "one.jsonl")
    with Store(tmp_path / "back.jsonl") as store:
        Evaluator(wanted, store).results(reversed(list(wanted.cases())))
        again = run_study(Evaluator(wanted, store, runner=lambda *planned: pytest.fail(f"planned again: {planned}")))
    assert again.to_json() == one.to_json() == study(wanted, tmp_path / "two.jsonl", in_processes(2)).to_json()
    (tmp_path / "study.json").write_text(one.to_json())
    assert load_study(tmp_path / "study.json") == one


def test_what_determines_a_point_is_in_its_key(tiny):
    wanted = space(tiny)
    keys = {
        digest_of(wanted.case(levels).request, effort)
        for levels in ({}, {"gpus": 1, "seq_len": 64}, {"optimizer": "sgd"}, {"subgroup_params": 1000})
        for effort in ("plan", "certify")
    }
    keys |= {wanted.case({"mtbf": text}).key for text in ("1h", "2h", "memory=1h")}
    assert len(keys) == 11
    assert digest_of(wanted.case({}).request, "plan") == digest_of(space(tiny).case({"gpus": 1}).request, "plan")


def test_points_without_a_plan_are_results(tiny, tmp_path, monkeypatch):
    wanted = space(tiny, sweep={"device.memory_bytes": ("1MB,80GB",), "gpus": ("1,3",), "tensor_parallel": ("1,2",)})
    found = study(wanted, tmp_path / "s.jsonl")
    by = {
        (p.settings["device.memory_bytes"], p.settings["gpus"], p.settings["tensor_parallel"]): p.result
        for p in found.points
    }
    assert by[10**6, 1, 1].status == "lacks-memory"
    assert by[10**6, 1, 1].missing_bytes["gpu"] > 0
    assert by[80 * 10**9, 1, 1].status == "fits"
    assert by[80 * 10**9, 3, 2].status == "refused"  # 2 does not divide 3
    assert "must divide" in by[80 * 10**9, 3, 2].reason
    nowhere = space(tiny, set={"hardware": "h100x4-80g", "gpus": "8"}).case({})
    assert "inter_node" in nowhere.refused.reason  # a machine without a network
    monkeypatch.setattr(point, "find", lambda *_, **__: 1 / 0)
    result = plan_point(wanted.case({}).request, "plan")
    assert (result.status, result.reason) == ("failed", "ZeroDivisionError: division by zero")


def test_designs(tiny):
    sweep = {"pcie": ("1x,2x",), "gpus": ("1,2,4",)}
    rows = [case.settings for case in space(tiny, sweep=sweep).cases()]
    assert rows == [{"host-link": a, "gpus": b} for a in (1, 2) for b in (1, 2, 4)]
    zipped = space(tiny, sweep={"pcie": ("1x,2x",), "gpus": ("1,2",)}, design="zip")
    assert [case.settings for case in zipped.cases()] == [{"host-link": 1, "gpus": 1}, {"host-link": 2, "gpus": 2}]
    with pytest.raises(ValueError, match="same number of values"):
        space(tiny, sweep=sweep, design="zip")


def test_random_designs_are_seeded_and_draw_nothing_twice(tiny):
    sweep = {"pcie": ("1x..9x..1x",), "gpus": ("1..9",)}
    drawn = [
        [
            tuple(c.settings.values())
            for c in space(tiny, sweep=sweep, design="random", num_points=40, seed=seed).cases()
        ]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 40
    assert len(space(tiny, sweep=sweep, design="random", num_points=1000)) == 81
    between = space(tiny, sweep={"pcie": ("0.5x..4x",)}, design="random", num_points=30)
    factors = [case.settings["host-link"] for case in between.cases()]
    assert min(factors) < 1
    assert max(factors) > 2
    assert all(0.5 <= factor <= 4 for factor in factors)
    with pytest.raises(ValueError, match="has no step"):
        space(tiny, sweep={"pcie": ("0.5x..4x",)})


def test_machines_and_models_are_axes(tiny, tmp_path):
    requested = StudyRequest(set={"model": tiny, "pcie": "2x"}, sweep={"hardware": ("h100,v100",)})
    found = study(Space(requested), tmp_path / "s.jsonl")
    assert [p.hardware for p in found.points] == ["h100", "v100"]
    for each in found.points:
        change = each.varied["host-link"]
        assert change.after == pytest.approx(2 * change.before)
    assert json.loads(found.to_json())["axes"][0]["values"] == ["h100", "v100"]
