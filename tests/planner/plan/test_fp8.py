"""Plans whose products are in fp8."""

import pytest
from machines import machine

from hwprofiles.registry import list_profiles, load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import FP32, Precision
from planner.explain.bench import Bench
from planner.explain.tricks import TRICKS, without
from planner.graph import Gemm
from planner.models import resolve_model
from planner.models.config import ModelConfigError
from planner.placements import mixed
from planner.plan.competition import _plainest, compete
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.search import Candidate
from planner.setup import Mix
from planner.verification import verify

IN_FP8 = Precision(weights="bf16", products="fp8")
HAVE_FP8 = {"h100", "h200", "gh200", "b200", "gb200", "rtx-4090", "rtx-5090", "mi300x"}


def request(**options: object) -> Request:
    defaults = {"model": resolve_model("demo-llama"), "hardware": machine(fp8_flop_per_s=4e14), "precision": IN_FP8}
    defaults |= {"seq_len": 256, "micro_batch": 1, "subgroup_params": 1_000_000}
    return Request(**{**defaults, **options})  # type: ignore[arg-type]


def products(plan: Plan) -> dict[str, set[bool]]:
    """Return whether the products of each kind of operator are in fp8."""
    found: dict[str, set[bool]] = {}
    for unit in plan.units():
        for operator in unit.operators:
            for kernel in operator.forward + operator.backward:
                if isinstance(kernel, Gemm):
                    found.setdefault(operator.kind, set()).add(kernel.fp8)
    return found


def test_linear_layers_of_hidden_layers_multiply_in_fp8_and_nothing_else() -> None:
    plan = make_plan(request(), 20)
    assert products(plan) == {kind: {kind != "head"} for kind in ("qkv", "output", "up", "down", "head")}
    assert products(make_plan(request(precision="bf16"), 20)) == {kind: {False} for kind in products(plan)}


@pytest.mark.part(2)
@pytest.mark.parametrize("options", [{}, {"gpu_bytes": 1.3e8}, {"gpu_bytes": 1.3e8, "kind": "host"}], ids=str)
def test_bounds_hold_and_a_plan_verifies(options: dict[str, object]) -> None:
    """Also where state leaves the device."""
    plan = make_plan(request(hardware=machine(fp8_flop_per_s=4e14, **options)), 40)  # type: ignore[arg-type]
    assert plan.decisions.pipeline_parallel == 1
    assert 0 < plan.certificate.bound_s <= plan.prediction.iteration_s
    found = verify(Plan.model_validate_json(plan.to_json()))
    assert found.iteration_s == pytest.approx(plan.prediction.iteration_s, rel=1e-9)


def test_where_computing_binds_fp8_is_faster_and_explain_says_what_it_is_worth() -> None:
    shallow = resolve_model("llama-3-8b").model_copy(update={"num_layers": 4})
    options = {"model": shallow, "hardware": load_profile("h100"), "num_devices": 8}
    options |= {"seq_len": 2048, "micro_batch": 4, "subgroup_params": 100_000_000}
    narrow, wide = (make_plan(request(**options, precision=precision), 20) for precision in (IN_FP8, "bf16"))
    assert narrow.prediction.iteration_s < 0.95 * wide.prediction.iteration_s
    trick = next(trick for trick in TRICKS if trick.key == "fp8-products")
    trial = without(Bench(narrow), trick)
    assert trial is not None
    assert trial.iteration_s == pytest.approx(wide.prediction.iteration_s, rel=0.02)


def test_weights_may_be_in_fp32() -> None:
    plan = make_plan(request(precision=FP32.model_copy(update={"products": "fp8"})), 20)
    assert plan.decisions.precision.weight_bytes == 4
    assert True in products(plan)["up"]


def small(**options: object) -> Request:
    """Return a request of which weights have to be fetched, several times an iteration."""
    small = machine(fp8_flop_per_s=1e16, flop_per_s=1e16, gpu_bytes=5e7)
    return request(**{"hardware": small, "num_micro_batches": 4, **options})


def test_weights_that_are_fetched_are_fetched_in_fp8_where_that_is_faster() -> None:
    plan, wide = make_plan(small(), 120), make_plan(small(fp8_weights=False), 40)
    assert (plan.decisions.fp8_weights, wide.decisions.fp8_weights) == (True, None)
    assert plan.prediction.iteration_s < 0.96 * wide.prediction.iteration_s
    assert "weights fetched in fp8" in str(plan)
    assert plan.decisions == make_plan(small(fp8_weights=True), 120).decisions
    assert {proof.choice.fp8_weights for proof in plan.certificate.proofs} == {None, True}
    assert plan.certificate.bound_s <= plan.prediction.iteration_s
    again = verify(Plan.model_validate_json(plan.to_json()))
    assert again.iteration_s == pytest.approx(plan.prediction.iteration_s, rel=1e-9)
    trial = without(Bench(plan), next(trick for trick in TRICKS if trick.key == "fp8-weights"))
    assert trial is not None
    assert trial.decisions.fp8_weights is None
    assert trial.iteration_s > 1.04 * plan.prediction.iteration_s
    # Where nothing is fetched, a plan does not say that it would be. (A fetch would save the launches of casts.)
    roomy = machine(fp8_flop_per_s=4e14, issue_s=1e-9)
    assert make_plan(request(hardware=roomy), 20).decisions.fp8_weights is None


def test_plans_with_fp8_weights_that_fetch_nothing() -> None:
    """They are plans of the choice without; if it was asked for, no engine takes their place."""
    plain, narrow = rivals = variants(request())
    resident = mixed(narrow.setup, Mix(99, 0, 99))
    candidate = Candidate(resident, 1.0, {})
    assert resident.fp8_weights
    found, same = _plainest(rivals, narrow, candidate)
    assert (found.choice, same.decisions) == (plain.choice, resident.model_copy(update={"fp8_weights": None}))
    at_once = {"model": resolve_model("demo-llama").model_copy(update={"num_layers": 1})}
    at_once |= {"hardware": machine(fp8_flop_per_s=4e14, issue_s=1e-9)}  # whoever fetches is slower
    plain, narrow = variants(request(**at_once))
    competition = compete((narrow, plain), 1)  # the first of two that are equal
    assert (competition.own, competition.decisions.fp8_weights) == (plain, None)
    asked = make_plan(request(fp8_weights=True), 1)
    assert (asked.decisions.fp8_weights, asked.certificate.proofs[0].choice.fp8_weights) == (True, True)
    verify(asked)


def test_only_products_in_fp8_have_weights_in_fp8() -> None:
    with pytest.raises(
        ValueError, match=r"^fp8_weights needs products in fp8, not bf16; plan with --precision products=fp8"
    ):
        request(precision="bf16", fp8_weights=True)
    assert [v.choice.fp8_weights for v in variants(request(precision="bf16"))] == [None]
    assert [v.choice.fp8_weights for v in variants(request(optimizer="muon", fp8_weights=False))] == [None]


def test_devices_without_such_products_are_refused_in_one_line() -> None:
    for name in list_profiles():
        has = "fp8" in load_profile(name).device.gemm
        if not has:
            with pytest.raises(ValueError, match=f"^profile {name} says nothing about products in fp8: [^\n]*$"):
                request(hardware=load_profile(name))
        assert has or name not in HAVE_FP8
    assert "fp8" not in load_profile("a100-80").device.gemm


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": resolve_model("gpt2")}, "gpt2 has Conv1D modules"),
        ({"layer_tile_tokens": 64}, "layer_tile_tokens is 64, but in fp8 each part of a tensor would have a scale"),
        ({"seq_len": 100}, "a product has 100 tokens, but products in fp8 need a multiple of 16"),
        (
            {"model": resolve_model("demo-llama").model_copy(update={"hidden_size": 264})},
            "products of 264 x .*, but products in fp8 need multiples of 16",
        ),
    ],
)
def test_models_and_batches_that_fp8_does_not_suit(options: dict[str, object], words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        make_plan(request(**options), 5)


def test_ranks_do_not_share_matrices_in_fp8() -> None:
    """Each part would have a scale of its own."""
    many = {"hardware": machine(fp8_flop_per_s=4e14, devices_per_node=4), "num_devices": 4}
    with pytest.raises(ValueError, match="tensor_parallel is 2, but in fp8 each part of a matrix would have a scale"):
        request(**many, tensor_parallel=2)
    chosen = make_plan(request(**many, micro_batch=None, global_batch=8), 20)
    assert chosen.decisions.tensor_parallel == 1
