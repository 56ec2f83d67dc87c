"""Planning again while training goes on: ``ullage execute --replan`` and ``ullage.replan``."""

import json
from pathlib import Path

import pytest
import torch

import ullage
from hwprofiles.paths import quantities
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import Place, UnitDecision
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.search import Scorer
from ullage.analysis.runs import load_run
from ullage.analysis.simulation import simulate
from ullage.main import main
from ullage.training.models import planned_model
from ullage.training.replanning import MARGIN, Replanned, plan_again


@pytest.fixture(scope="module")
def good() -> Plan:
    """The best that was found for a device which has room for everything."""
    model = resolve_model("demo-llama").model_copy(update={"num_layers": 2})
    hardware = load_profile("epyc-turin-2c").with_device_memory(400_000_000)
    return make_plan(Request(model, hardware, seq_len=32, micro_batch=1), max_simulations=30)


@pytest.fixture(scope="module")
def bad(good: Plan) -> Plan:
    """A plan that has everything on the host, fetches it twice, and recomputes all."""
    units = {
        name: UnitDecision(
            params="host", activations="recompute" if "layers" in name else "keep", update=(Place.CPU,) * n
        )
        for name, n in ((name, len(unit.update)) for name, unit in good.decisions.units.items())
    }
    decisions = good.decisions.model_copy(update={"units": units, "num_param_slots": 1})
    request = Request(good.model, good.hardware, seq_len=good.seq_len, micro_batch=1)
    one = variants(request)[0]
    prediction = Scorer.of(one).predict(decisions)
    return good.model_copy(update={"decisions": decisions, "prediction": prediction}).sealed()


def test_a_better_plan_takes_over_and_training_is_the_same(
    bad: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(bad.to_json(), encoding="utf-8")
    out = tmp_path / "out"
    printed = []
    saved = tmp_path / "saved"
    for options in ([], ["--replan", "--checkpoint-dir", f"{saved},every=4,keep=9"]):
        arguments = ["execute", str(path), "--iterations", "16", "--output-dir", str(out), "--json", *options]
        assert main(arguments) == 0
        printed.append(json.loads(capsys.readouterr().out))
    stayed, changed = printed
    assert changed["losses"] == stayed["losses"], "in all bits"
    replanned = changed["replan"]
    assert replanned["switched"]
    assert replanned["before"]["predicted_s"] == bad.prediction.iteration_s
    assert replanned["after"]["predicted_s"] < (1 - MARGIN) * replanned["before"]["predicted_again_s"]
    assert replanned["before"]["measured_s"] == pytest.approx(
        replanned["comparison_before"]["phases"]["iteration"]["measured"], rel=0.5
    )
    assert replanned["before"]["decided"] != replanned["after"]["decided"]
    assert replanned["comparison_before"]["memory"]["host"]["error"] == 0
    assert replanned["comparison_before"]["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.15)
    assert changed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.15)
    assert "changed to it: the state passed through a file of " in replanned["words"]
    run = load_run(out / "run.json")
    assert run.before is not None
    assert run.before.plan == bad
    sources = {item.provenance.source for item in quantities(run.plan.hardware).values()}
    assert any(source.startswith("tasks of ") for source in sources)  # which of them is believed, noise decides
    assert (run.timeline.num_iterations, run.before.timeline.num_iterations, len(run.losses)) == (6, 10, 16)
    assert run.data_position == 16
    assert sorted(path.name for path in out.iterdir()) == ["run.json", "trace.json.gz"]
    assert sorted(path.name for path in saved.glob("step-*")) == [f"step-{step:08d}" for step in (4, 8, 12, 16)]


def test_a_loop_goes_on_with_its_scheduler_and_its_checkpoints(bad: Plan, tmp_path: Path) -> None:
    """Those of the new plan too are gone on from under any other."""
    found = []
    level, storage = ullage.Level(tmp_path / "checkpoints", every=4), tmp_path / "storage"
    tokens = torch.arange(32).view(1, 32) * 7 % 250
    room = {"checkpoint_buffer_bytes": 64_000_000}
    for replans in (False, True):
        torch.manual_seed(3)
        made = planned_model(bad).train()
        model, optimizer = ullage.prepare(made, torch.optim.AdamW(made.parameters()), bad, storage_dir=storage, **room)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        checkpoints = ullage.Checkpoints(optimizer, level) if replans else None
        losses = []
        for iteration in range(9):
            if replans and iteration == 6:
                with pytest.raises(ValueError, match="checkpoints are open, of the plan that ends now; close them in"):
                    ullage.replan(optimizer)
                done = ullage.replan(optimizer, checkpoints.close)
                assert done.switched
                assert optimizer.plan is done.after
                assert done.host_bytes >= bad.prediction.memory["host"].peak_bytes  # type: ignore[index]
                words, checkpoints = str(done), ullage.Checkpoints(optimizer, level)
            if replans and iteration == 8:
                checkpoints.save(iteration, {"scheduler": scheduler.state_dict()})
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss))
        weights = {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}
        if checkpoints is not None:
            checkpoints.finish()
            checkpoints.close()
        optimizer.session.close()
        found.append((losses, weights))
    (losses, weights), (again, after) = found
    assert losses == again
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())
    assert words.startswith("planned again: ")
    assert "\n" not in words
    assert list(storage.iterdir()) == []
    made = planned_model(bad).train()
    model, optimizer = ullage.prepare(made, torch.optim.AdamW(made.parameters()), bad, **room)
    with optimizer.session, ullage.Checkpoints(optimizer, level) as checkpoints:
        resumed = checkpoints.resume()
        assert (resumed.step, resumed.extra["scheduler"]["last_epoch"]) == (8, 8)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found_again = optimizer.session.full_parameters()
        assert all(torch.equal(found_again[name], weight) for name, weight in weights.items())


def test_a_plan_that_is_as_good_stays(good: Plan) -> None:
    """Where all was measured as predicted, the profile stays, and so does the plan."""
    found = plan_again(good, simulate(good, 8).timeline)
    assert found.refit.profile == good.hardware
    assert not found.is_faster
    assert "not faster by more than 5%, so the plan stays" in str(found)
    assert found.to_json()["after"]["predicted_s"] == pytest.approx(good.prediction.iteration_s, rel=MARGIN)
    nothing = Replanned(found.before, None, found.refit)
    assert not nothing.is_faster
    assert "the search found no other plan that can be executed" in str(nothing)


def test_bad_input(good: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="4 recorded iterations are too few to plan again; train 5 first"):
        plan_again(good, simulate(good, 4).timeline)
    path = tmp_path / "plan.json"
    path.write_text(good.to_json(), encoding="utf-8")
    assert main(["execute", str(path), "--replan", "--iterations", "15", "--output-dir", str(tmp_path / "out")]) == 2
    assert "but there are 15; run at least 16" in capsys.readouterr().err
