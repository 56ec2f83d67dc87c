"""From a request to a plan, or to a refusal that says what to do."""

import dataclasses
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import decide, small_units
from machines import machine, rate

from benchmarks.planning import accumulated
from hwprofiles.registry import load_profile
from planner.bounds.certificate import infeasible, prove_misfits
from planner.bounds.proof import Proof
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import Place
from planner.models import resolve_model
from planner.plan.competition import first_fit
from planner.plan.document import describe
from planner.plan.planning import InfeasibleError, default_precision, find, make_plan
from planner.schedule.tasks import MemoryClass, Tier
from planner.verification import verify
from ullage.analysis.simulation import planned
from ullage.rivals import make_plan as rivals_plan

DEMO = resolve_model("demo-llama")


def request(**options: object) -> Request:
    defaults = {"model": DEMO, "hardware": machine(), "seq_len": 256, "micro_batch": 1, "subgroup_params": 1_000_000}
    return Request(**{**defaults, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flop_per_s", "weights"),
    [
        ({"bf16": 2e14, "fp32": 1e14}, "bf16"),
        ({"bf16": 1e14, "fp32": 2e14}, "bf16"),
        ({"bf16": 1e14, "fp32": 2.1e14}, "fp32"),
        ({"bf16": 1e14}, "bf16"),
        ({"fp32": 1e14}, "fp32"),
    ],
)
def test_the_default_precision_is_bf16_unless_fp32_is_multiplied_more_than_twice_as_fast(
    flop_per_s: dict[str, float], weights: str
) -> None:
    gemm = {dtype: rate(per_s, "flop") for dtype, per_s in flop_per_s.items()}
    device = machine().device.model_copy(update={"gemm": gemm})
    assert default_precision(device).weights == weights


def test_a_plan_says_what_was_asked_and_predicted() -> None:
    planned_request = request(num_devices=2, hardware=machine(devices_per_node=2), num_micro_batches=2, clip=False)
    plan = rivals_plan(planned_request, 300)
    decisions, prediction = plan.decisions, plan.prediction
    assert (plan.model, plan.seq_len, plan.hardware) == (DEMO, 256, planned_request.hardware)
    assert (decisions.data_parallel, decisions.micro_batch, decisions.num_micro_batches) == (2, 1, 2)
    assert not decisions.clip
    assert prediction.fits
    assert prediction.converged
    assert prediction.iteration_s == pytest.approx(prediction.forward_s + prediction.backward_s + prediction.update_s)
    assert prediction.tokens_per_s == pytest.approx(2 * 2 * 256 / prediction.iteration_s)
    assert 0 < prediction.model_flop_per_s < 1e14  # what the device can do
    rows = [row.iteration_s for row in plan.engines if row.fits and row.iteration_s and row.numerics is None]
    assert prediction.iteration_s <= min(rows) * 1.02
    assert plan.content_digest == plan.digest()


def test_proofs_made_during_the_search_are_those_of_the_certificate() -> None:
    """Some ZeRO stages do not fit: their proofs need no plan, and are the same whenever they are made."""
    planned_request = request(num_devices=4, hardware=machine(devices_per_node=4, gpu_bytes=5e7))
    rivals = variants(planned_request)
    misfits = prove_misfits(rivals)
    assert 0 < len(misfits) < 4 * len(rivals)
    found = find(planned_request, 60)
    proofs = {(proof.choice, proof.zero_stage): proof for proof in found.certificate().proofs}
    assert {key: proofs[key] for key in misfits} == misfits
    assert all((proof.overrun is None) == (key not in misfits) for key, proof in proofs.items())
    with ThreadPoolExecutor(1) as pool:
        assert find(planned_request, 60, pool=pool).certificate() == found.certificate()


def test_the_same_request_gives_the_same_bytes_in_another_process() -> None:
    program = (
        "from machines import machine\n"
        "from planner.models import resolve_model\n"
        "from planner.plan.planning import Request, make_plan\n"
        "model = resolve_model('demo-llama')\n"
        "asked = Request(model, machine(gpu_bytes=2e8), seq_len=256, micro_batch=1, subgroup_params=1_000_000)\n"
        "print(make_plan(asked, max_simulations=20).to_json(), end='')\n"
    )
    root, here = Path(__file__).parents[3], Path(__file__).parents[1]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(root), str(here)])},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("{")


def test_a_refusal_names_tier_amount_and_remedy() -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(request(hardware=machine(gpu_bytes=1e7)))
    message = str(caught.value)
    start = "demo-llama does not fit on 1 device(s) of round: the round lacks "
    assert message.startswith(start)
    for remedy in ("--micro-batch", "--seq-len", "more --gpus", "a device with more memory"):
        assert remedy in message


def test_a_refusal_of_a_real_model_says_how_much() -> None:
    # 18 B/param need 540 GB, and both tiers together have less than 100.
    planned_request = Request(resolve_model("opt-30b"), load_profile("rtx-3090"), seq_len=512, micro_batch=1)
    with pytest.raises(
        InfeasibleError, match=r"the host \(1 device\(s\) per node\) lacks (\d+)\.\d GB beyond"
    ) as caught:
        make_plan(planned_request, max_simulations=1)
    assert "use more --gpus (or nodes), or a host with more memory" in str(caught.value)


def test_what_a_refusal_states_is_one_story() -> None:
    """Also where nothing needs simulating, as what is always held is more than there is already."""
    needed_bytes = []
    for capacity_bytes in (1_000_000, 4_000_000, 16_000_000):
        with pytest.raises(InfeasibleError, match="it is proven") as caught:
            make_plan(request(hardware=machine(gpu_bytes=capacity_bytes)))
        missing_bytes = caught.value.missing_bytes[Tier.GPU]
        found = re.search(
            r"lacks (\S+) MB beyond its (\S+) MB \((\S+) % .* at least (\S+) % of some", str(caught.value)
        )
        assert found is not None
        lacking, capacity, percent, least = map(float, found.groups())
        assert (lacking, capacity) == (pytest.approx(missing_bytes / 1e6, rel=0.01), capacity_bytes / 1e6)
        assert percent == pytest.approx(100 * missing_bytes / capacity_bytes, rel=0.01)
        assert percent >= least
        needed_bytes.append(capacity_bytes + missing_bytes)
    assert max(needed_bytes) < 1.1 * min(needed_bytes)  # whatever there is


def test_a_refusal_names_every_memory_that_is_too_small() -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(request(hardware=machine(gpu_bytes=1e6, host_bytes=1e7)))
    assert set(caught.value.missing_bytes) == {Tier.GPU, Tier.HOST}
    for words in ("the host (1 device(s) per node) lacks", " and the round lacks", "smaller --micro-batch", "or nodes"):
        assert words in str(caught.value)


@pytest.mark.parametrize(("overrun", "words"), [(1e-9, "that no schedule fits;"), (0.2999, "at least 29.9 % of some")])
def test_no_more_is_said_than_is_proven(overrun: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_request = request(hardware=machine(gpu_bytes=1e7))
    proof = Proof(choice=variants(planned_request)[0].choice, zero_stage=0, overrun=overrun, multipliers={})
    monkeypatch.setattr("planner.plan.planning.infeasible", lambda _rivals: (proof,))
    with pytest.raises(InfeasibleError, match=words):
        make_plan(planned_request)


@pytest.mark.parametrize("name", ["num_devices", "seq_len", "micro_batch", "num_micro_batches", "subgroup_params"])
def test_counts_start_at_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, but must be a whole number of at least 1"):
        request(**{name: 0})


def test_more_devices_than_a_lone_node_has() -> None:
    with pytest.raises(ValueError, match=r"round has 1 device\(s\) and no network .* ask for at most 1"):
        request(hardware=machine(inter_node=False), num_devices=2)


def test_a_bigger_device_is_never_slower() -> None:
    times_s = [make_plan(request(hardware=machine(gpu_bytes=n)), 60).prediction.iteration_s for n in (1.5e8, 1e9)]
    assert times_s[1] <= times_s[0] * (1 + 1e-6)


def test_descriptions() -> None:
    units = small_units()
    assert describe(decide(units, Place.GPU), units) == "100 % of updates on the device, activations kept"
    described = describe(decide(units, Place.CPU, params="host", recompute=True), units)
    assert described == "100 % of updates on the CPU, 4 of 6 units recomputed, parameters of 6 units on the host"
    assert describe(decide(units, Place.STREAM, data_parallel=2, zero_stage=3), units).endswith(
        "activations kept, ZeRO-3"
    )


def test_prediction_memory_is_within_capacity() -> None:
    plan = make_plan(request(hardware=machine(gpu_bytes=1.5e8)), 60)
    assert set(plan.prediction.memory) == {Tier.GPU, Tier.HOST}  # nothing goes to NVMe unasked
    for tier in (Tier.GPU, Tier.HOST):
        used = plan.prediction.memory[tier]
        assert 0 < used.peak_bytes <= used.capacity_bytes
        assert sum(used.by_class.values()) == used.peak_bytes


def test_an_8b_model_with_accumulated_gradients_fits_where_whole_master_copies_do_not() -> None:
    """In 12 GiB of a GPU and 113 GB of a host: 14 bytes per parameter fit, 16 do not."""
    asked = accumulated.request(accumulated.machine(150e9))
    assert infeasible(variants(dataclasses.replace(asked, split_masters=False)))
    found = first_fit(variants(asked))
    assert found is not None
    assert found.decisions.split_masters


def _accumulated(host_bytes: float, gpu_bytes: float = 1e8) -> Request:
    hardware = machine(gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    return Request(resolve_model("demo-llama"), hardware, seq_len=128, micro_batch=1, num_micro_batches=2)


def test_master_copies_are_split_where_a_memory_is_full_and_that_is_faster() -> None:
    roomy = make_plan(dataclasses.replace(_accumulated(1e12, 6e7), split_masters=False), 60)
    asked = _accumulated(0.94 * roomy.prediction.memory[Tier.HOST].peak_bytes, 6e7)
    whole = make_plan(dataclasses.replace(asked, split_masters=False), 60)
    plan = make_plan(asked, 60)
    assert plan.decisions.split_masters
    assert "master copies split" in str(plan)
    assert plan.prediction.iteration_s < 0.9 * whole.prediction.iteration_s
    assert {proof.choice.split_masters for proof in plan.certificate.proofs} == {None, True}
    verify(plan)


def test_master_copies_are_split_where_nothing_fits_with_whole_ones_and_by_no_other_engine() -> None:
    asked = _accumulated
    whole = make_plan(dataclasses.replace(asked(1e12), split_masters=False), 1)
    assert not whole.decisions.split_masters
    held = whole.prediction.memory[Tier.HOST].by_class
    needed = held[MemoryClass.OPTIMIZER] + held[MemoryClass.PARAMETERS] + held[MemoryClass.GRADIENTS]
    shares = (0.95, 0.9, 0.85, 0.8, 0.75)
    plan = next(p for p in (make_plan(asked(share * needed), 20) for share in shares) if p.decisions.split_masters)
    verify(plan)
    assert not planned(plan, "zero-offload").decisions.split_masters
