"""Do the parents' claims come out of the planner by themselves? ``python benchmarks/planning/claims.py [SUBSTRING]``.

Four claims, none of which is stated anywhere in the program; each is simulated or planned on packaged profiles.

*elixir*: OPT-30B trains on one A100-40GB (Elixir, arXiv 2212.05339v1, whose abstract states 84 % of the efficiency of
PyTorch's training in GPU memory, without batch or sequence length). Efficiency here: tokens/s of our plan on one
device over tokens/s per device of the same model, sequences and micro-batch trained in memory by the fastest of ZeRO-1,
2 and 3 on the fewest devices (8, 16, 32 or 64) that hold it. Beside it, FLOP/s over those of OPT-1.3B, which fits into
one device and trains there in memory.

*twin-flow*: the best fraction of parameters updated by the CPU is the least that fits (DeepSpeed's blog on
ZeRO-Offload++: as near to the upper bound of GPU memory as may be), with activations as they are.

*stride*: every how many subgroups one is best streamed to the device follows the rates (Deep Optimizer States, arXiv
2410.21316): k subgroups take max((k - 1) S / U_cpu, 12 S / B) + S / U_gpu, so that the best k is that with the least
time per subgroup. U_cpu is the rate of a subgroup that the host updates and hands back, which holds up its next one.

*memory wall*: which phase dominates, and how that shifts (FlexScience 2024, arXiv 2406.10728), against the phases that
were measured on the same runs, and what binds in our plan of them.

With a substring only claims whose name has it are made again.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from hwprofiles.files import write_whole
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import Decisions
from planner.models import ModelConfig, resolve_model
from planner.optimizers import OPTIMIZERS
from planner.schedule.tasks import Tier
from planner.search import Candidate, Scorer, search
from planner.simulate.prediction import Prediction
from ullage.rivals.best import engine_policies
from ullage.rivals.cases import Metric, read_case
from ullage.rivals.cases.training import TrainingCase
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed import twin_flow, zero_offload, zero_offload_blocking
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.lowering import lower

HERE = Path(__file__).parents[1]
OUTPUT = HERE / "results" / "planning_claims.json"
OFFLOADED = HERE / "published" / "offloaded_update.json"
ELIXIR_EFFICIENCY = 0.84
MAX_SIMULATIONS = 60
FRACTIONS = tuple(i / 20 for i in range(20))
# What DeepSpeed's blog reports of 8 devices each: model, profile, speed-up over ZeRO-Offload at some unstated batch.
TWIN_FLOW_SPEEDUPS = (("opt-13b", "a100-40", 3.0), ("opt-30b", "h100", 6.0))
STRIDES = tuple(range(2, 17))
STRIDE_DEVICE_BYTES = 40_000_000_000
CPU_FACTORS = (0.25, 0.5, 1.0, 1.7, 3.0)
LINK_FACTORS = (0.5, 1.0, 1.6)


def elixir(micro_batch: int, seq_len: int = 1024) -> dict[str, Any]:
    """Plan OPT-30B on one A100 40 GB, and compare with in-memory training on the fewest that hold it."""
    profile, model = load_profile("a100-40"), resolve_model("opt-30b")
    request = Request(model, profile, micro_batch=micro_batch, seq_len=seq_len)
    one = variants(request)[0]
    setup = one.setup
    scorer = Scorer.of(one, lower=lower)
    ours = scorer.predict(search(setup, scorer, MAX_SIMULATIONS).decisions)
    num_devices, reference = _in_memory(request, (8, 16, 32, 64))
    _, small = _in_memory(dataclasses.replace(request, model=resolve_model("opt-1.3b")), (1,))
    return {
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "fits": ours.fits,
        "iteration_s": ours.iteration_s,
        "tokens_per_s": ours.tokens_per_s,
        "model_tflop_per_s": ours.model_flop_per_s / 1e12,
        "gpu_bytes": ours.memory[Tier.GPU].peak_bytes,
        "host_bytes": ours.memory[Tier.HOST].peak_bytes,
        "host_capacity_bytes": ours.memory[Tier.HOST].capacity_bytes,
        "in_memory_devices": num_devices,
        "in_memory_tokens_per_s_per_device": reference.tokens_per_s / num_devices,
        "small_in_memory_tflop_per_s": small.model_flop_per_s / 1e12,
        "flop_efficiency_over_small": ours.model_flop_per_s / small.model_flop_per_s,
        "efficiency": ours.tokens_per_s * num_devices / reference.tokens_per_s,
        "published_efficiency": ELIXIR_EFFICIENCY,
    }


def _in_memory(request: Request, counts: Sequence[int]) -> tuple[int, Prediction]:
    """Return the fewest devices that hold a model in memory, and the fastest way to train it there."""
    for num_devices in counts:
        one = variants(dataclasses.replace(request, num_devices=num_devices))[0]
        setup = one.setup
        scorer = Scorer.of(one, lower=lower)
        best = min(map(scorer.score, gpu_only(setup)), key=lambda candidate: candidate.order)
        if not best.missing_bytes:
            return num_devices, scorer.predict(best.decisions)
    raise ValueError(f"{request.model.name} needs more than {counts[-1]} device(s); give more counts")


def fraction_sweep(
    model: str, hardware: str, micro_batch: int, fractions: Sequence[float] = FRACTIONS
) -> list[dict[str, Any]]:
    """Simulate Twin-Flow with every fraction on 8 devices; one row for each way with activations."""
    request = Request(resolve_model(model), load_profile(hardware), num_devices=8, micro_batch=micro_batch)
    one = variants(request)[0]
    setup = one.setup
    scorer = Scorer.of(one, lower=lower)
    rows = []
    for activations in ("keep", "recompute"):
        alike = functools.partial(_of_activations, activations)
        tried = {}
        for fraction in fractions:
            (decisions,) = alike(twin_flow(setup, (fraction,)))
            tried[fraction] = scorer.score(decisions)
        fits = {fraction: candidate.iteration_s for fraction, candidate in tried.items() if not candidate.missing_bytes}
        if not fits:
            continue
        best = min(fits, key=lambda fraction: fits[fraction])
        whole = [scorer.score(*alike(engine(setup))) for engine in (zero_offload, zero_offload_blocking)]
        rows.append(
            {
                "model": model,
                "hardware": hardware,
                "micro_batch": micro_batch,
                "activations": activations,
                "least_fraction_that_fits": min(fits),
                "best_fraction": best,
                "iteration_s": fits,
                "speedup_over_zero_offload": whole[0].iteration_s / fits[best],
                "speedup_over_blocking_zero_offload": whole[1].iteration_s / fits[best],
            }
        )
    return rows


def _of_activations(activations: str, candidates: Iterator[Decisions]) -> Iterator[Decisions]:
    for decisions in candidates:
        if any(unit.activations == "recompute" for unit in decisions.units.values()) == (activations == "recompute"):
            yield decisions


def with_rates(profile: HardwareProfile, cpu: float, link: float) -> HardwareProfile:
    """Return a machine with other rates of CPU updates and of the link, and a DRAM that limits neither."""
    data = profile.model_dump()
    host, host_link = profile.host, profile.host_link
    data["host"] |= {"optimizer": _faster(host.optimizer, cpu), "optimizer_process_params_per_s": None}
    data["host"]["dram_bytes_per_s"]["value"] *= 100
    data["host_link"] |= {way: _faster(getattr(host_link, way), link) for way in ("down", "up")}
    ways = (host_link.down, host_link.up)
    data["host_link"]["both_bytes_per_s"]["value"] = link * sum(curve.best_rate_per_s() for curve in ways)
    return HardwareProfile.model_validate(data)


def _faster(curve: Curve, factor: float) -> dict[str, Any]:
    data = curve.model_dump()
    for point in data["points"]:
        for name in ("p10_s", "median_s", "p90_s"):
            point[name] /= factor
    return data


def formula_stride(profile: HardwareProfile, subgroup_params: int, num_slots: int) -> tuple[int, float]:
    """Return the best stride by the published formula, and where its two sides meet, which is seldom an integer.

    The formula lets state leave while other state comes, which takes two slots; with one, both take turns.
    """
    link = profile.host_link
    upload_s = link.down.time_s(4 * subgroup_params)  # the new weights in fp32, cast on the device
    host_s = profile.host.optimizer.time_s(subgroup_params) + upload_s
    ways_s = [way.time_s(OPTIMIZERS["adamw"].state_bytes_per_param * subgroup_params) for way in (link.down, link.up)]
    stream_s = sum(ways_s) if num_slots == 1 else max(ways_s)
    device_s = profile.device.optimizer.time_s(subgroup_params)
    per_subgroup_s = {k: (max((k - 1) * host_s, stream_s) + device_s) / k for k in STRIDES}
    return min(per_subgroup_s, key=lambda k: per_subgroup_s[k]), 1 + stream_s / host_s


def stride(cpu: float, link: float, num_slots: int, *, plans: bool) -> dict[str, Any]:
    """Sweep the stride at some rates, and compare with the formula, and with our plan if asked for."""
    profile = with_rates(load_profile("h100"), cpu, link).with_device_memory(STRIDE_DEVICE_BYTES)
    request = Request(resolve_model("llama-2-7b"), profile, micro_batch=1)
    one = variants(request)[0]
    setup = one.setup
    scorer = Scorer.of(one, lower=lower)
    strides = {}
    for k in STRIDES:
        (decisions,) = _of_activations("recompute", interleaved(setup, (k,)))
        strides[k] = scorer.score(decisions.model_copy(update={"num_state_slots": num_slots})).iteration_s
    best = min(strides, key=lambda k: strides[k])
    by_formula, meeting = formula_stride(profile, setup.given.subgroup_params, num_slots)
    row = {
        "cpu_factor": cpu,
        "link_factor": link,
        "num_slots": num_slots,
        "formula_meets_at": meeting,
        "formula_stride": by_formula,
        "best_stride": best,
        "iteration_s": strides,
        "formula_over_best": strides[by_formula] / strides[best],
    }
    if plans:
        ours = search(setup, scorer, MAX_SIMULATIONS)
        row |= {"best_stride_over_ours": strides[best] / ours.iteration_s}
    return row


def memory_wall(name: str, *, plans: bool) -> dict[str, Any]:
    """Compare the phases of a published run with ours; plan the same model on the same machine if asked for."""
    data = next(case for case in json.loads(OFFLOADED.read_text())["cases"] if case["id"] == name)
    case = read_case(data)
    assert isinstance(case, TrainingCase)
    assert isinstance(case.model, ModelConfig)
    profile = load_profile(case.hardware)
    predicted, measured = case.predict(profile).values, case.measurements()
    row = {
        "case": name,
        "predicted_shares": _shares(predicted),
        "measured_shares": _shares(measured),
        "predicted_s": predicted[Metric.ITERATION],
        "measured_s": measured[Metric.ITERATION],
    }
    if plans:
        request = Request(
            case.model, profile, num_devices=case.devices, seq_len=case.seq_len, micro_batch=case.micro_batch
        )
        one = variants(request)[0]
        setup = one.setup
        scorer = Scorer.of(one, lower=lower)
        ours = search(setup, scorer, MAX_SIMULATIONS)
        row["engines"] = {engine: _bound(scorer, found) for engine, found in engine_policies(setup, scorer).items()}
        row["ours"] = _bound(scorer, ours)
    return row


def _bound(scorer: Scorer, found: Candidate) -> dict[str, Any] | None:
    """Return the iteration, the update's share of it, and the shares of the critical path by lane."""
    if found.missing_bytes:
        return None
    prediction = scorer.predict(found.decisions)
    critical = sum(prediction.critical_s.values())
    return {
        "iteration_s": prediction.iteration_s,
        "update_share": prediction.update_s / prediction.iteration_s,
        "critical_shares": {lane: seconds / critical for lane, seconds in sorted(prediction.critical_s.items())},
    }


def _shares(values: dict[Metric, float]) -> dict[str, float]:
    phases = (Metric.FORWARD, Metric.BACKWARD, Metric.UPDATE)
    return {phase.value: values[phase] / values[Metric.ITERATION] for phase in phases}


def jobs() -> dict[str, Callable[[], Any]]:
    """Return everything there is to do, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for micro_batch in (2, 4, 8, 16):
        found[f"elixir {micro_batch}"] = functools.partial(elixir, micro_batch)
    for model, hardware, _ in TWIN_FLOW_SPEEDUPS:
        for micro_batch in (1, 4, 8):
            name = f"twin-flow {model} {hardware} {micro_batch}"
            found[name] = functools.partial(fraction_sweep, model, hardware, micro_batch)
    for cpu, link, num_slots in itertools.product(CPU_FACTORS, LINK_FACTORS, (1, 2)):
        plans = num_slots == 2 and link == LINK_FACTORS[1] and cpu in CPU_FACTORS[::2]
        found[f"stride {cpu} {link} {num_slots}"] = functools.partial(stride, cpu, link, num_slots, plans=plans)
    for flush in ("blocking", "async"):
        for fraction in ("1", "0.8", "0.5"):
            name = f"h100x4-20b-l40-tp1-dp4-mb1-gb4-r{fraction}-sg100m-{flush}-flush"
            plans = fraction == "1" and flush == "async"
            found[f"memory wall {flush} {fraction}"] = functools.partial(memory_wall, name, plans=plans)
    return found


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return what all results say about each claim."""

    def of(claim: str) -> list[Any]:
        return [result for name, result in results.items() if name.startswith(claim)]

    fractions = [row for rows in of("twin-flow") for row in rows]
    strides = of("stride")
    walls = of("memory wall")
    return {
        "elixir": [
            {name: row[name] for name in ("micro_batch", "efficiency", "flop_efficiency_over_small", "host_bytes")}
            for row in of("elixir")
        ],
        "twin_flow": {
            "num_sweeps": len(fractions),
            "best_is_least": sum(row["best_fraction"] == row["least_fraction_that_fits"] for row in fractions),
            "most_speedup": {
                f"{model} on 8 x {hardware}": {
                    "published": published,
                    **{
                        f"over {engine}": max(
                            (r[f"speedup_over_{engine}"] for r in fractions if r["model"] == model), default=None
                        )
                        for engine in ("zero_offload", "blocking_zero_offload")
                    },
                }
                for model, hardware, published in TWIN_FLOW_SPEEDUPS
            },
        },
        "stride": {
            "num_sweeps": len(strides),
            "equal": sum(row["best_stride"] == row["formula_stride"] for row in strides),
            "equal_or_neighbour": sum(abs(row["best_stride"] - row["formula_stride"]) <= 1 for row in strides),
            "most_lost_by_formula": max((row["formula_over_best"] - 1 for row in strides), default=None),
            "least_best_stride_over_ours": min(
                (row["best_stride_over_ours"] for row in strides if "best_stride_over_ours" in row), default=None
            ),
        },
        "memory_wall": [
            [row["case"], round(row["predicted_shares"]["update"], 2), round(row["measured_shares"]["update"], 2)]
            for row in walls
        ],
    }


def main() -> None:
    """Do what matches, keep the rest, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("substring", nargs="?", default="")
    args = parser.parse_args()
    known = jobs()
    results = json.loads(OUTPUT.read_text())["results"] if OUTPUT.exists() else {}
    for name in track([name for name in known if args.substring in name], description="claims"):
        results[name] = json.loads(json.dumps(known[name]()))
        ordered = {other: results[other] for other in known if other in results}
        whole = {"command": "python benchmarks/planning/claims.py", "summary": summary(ordered), "results": ordered}
        write_whole(OUTPUT, json.dumps(whole, indent=1) + "\n")
    print(json.dumps(summary(results), indent=1))


if __name__ == "__main__":
    main()
