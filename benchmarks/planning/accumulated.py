"""Does Llama-3-8B fit in 12 GiB of a GPU and 113 GB of a host, with all of AdamW's values in fp32?

``python benchmarks/planning/accumulated.py`` plans steps of 64k tokens in 8 micro-batches, with clipping, for an H100
with 16 host cores. What memory such a host gives per second is not known, so there are two machines. Beside them stands
DeepSpeed's ZeRO-3 with offloading, on the same machines and on ones with as much memory as it takes.
"""

from pathlib import Path
from typing import Any, Final

from benchmarks.origin import origin, write_result
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Quantity
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models import resolve_model
from planner.plan.document import describe
from planner.plan.planning import make_plan
from planner.schedule.tasks import Tier
from planner.search import Candidate, best_of
from planner.verification import verify
from ullage.rivals.best import best_of_engine, scorer_of

MODEL: Final = "llama-3-8b"
SEQ_LEN, MICRO_BATCH, NUM_MICRO_BATCHES = 2048, 4, 8
DEVICE_BYTES, HOST_BYTES, ROOMY_BYTES = 12 * 2**30, 113e9, 160e9
DRAM_BYTES_PER_S: Final = (150e9, 300e9)
NUM_CORES, NUM_UPDATING = 16, 14
DEEPSPEED: Final = "zero-offload"
OUTPUT: Final = Path(__file__).parents[1] / "results" / "planning_accumulated.json"


def machine(dram_bytes_per_s: float, host_bytes: float = HOST_BYTES) -> HardwareProfile:
    """Return one H100 of which 12 GiB are used, beside 16 cores of a host."""
    known = load_profile("h100")

    def changed(quantity: Quantity, value: float) -> Quantity:
        assumed = quantity.provenance.model_copy(update={"origin": "assumed", "source": "a question, not a machine"})
        return quantity.model_copy(update={"value": value, "provenance": assumed})

    host = {
        "memory_bytes": changed(known.host.memory_bytes, host_bytes),
        "dram_bytes_per_s": changed(known.host.dram_bytes_per_s, dram_bytes_per_s),
        "num_cores": NUM_CORES,
        "num_optimizer_cores": NUM_UPDATING,
    }
    device = {"memory_bytes": changed(known.device.memory_bytes, DEVICE_BYTES)}
    whole = known.model_dump(mode="json") | {"devices_per_node": 1}
    for part, fields in (("host", host), ("device", device)):
        whole[part] |= {name: v.model_dump(mode="json") if isinstance(v, Quantity) else v for name, v in fields.items()}
    return HardwareProfile.model_validate(whole)


def request(hardware: HardwareProfile) -> Request:
    """Return the request, of AdamW with clipping."""
    return Request(
        resolve_model(MODEL),
        hardware,
        seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH,
        num_micro_batches=NUM_MICRO_BATCHES,
        storage="activations",
    )


def deepspeed(hardware: HardwareProfile) -> Candidate:
    """Return the best candidate of DeepSpeed, with the loss in tiles or whole."""
    asked = request(hardware)
    return best_of(best_of_engine(each.setup, scorer_of(each), DEEPSPEED) for each in variants(asked))


def cell(dram_bytes_per_s: float) -> dict[str, Any]:
    """Plan and verify for one machine."""
    plan = make_plan(request(machine(dram_bytes_per_s)))
    verify(plan)
    theirs, roomy = (deepspeed(machine(dram_bytes_per_s, host_bytes)) for host_bytes in (HOST_BYTES, ROOMY_BYTES))
    iteration_s, num_tokens = plan.prediction.iteration_s, SEQ_LEN * MICRO_BATCH * NUM_MICRO_BATCHES
    return {
        "dram_bytes_per_s": dram_bytes_per_s,
        "fits": plan.prediction.fits,
        "iteration_s": iteration_s,
        "tokens_per_s": num_tokens / iteration_s,
        "bound_s": plan.certificate.bound_s,
        "held_bytes": {tier.value: plan.prediction.memory[tier].peak_bytes for tier in (Tier.GPU, Tier.HOST)},
        "placement": describe(plan.decisions, plan.units()),
        "deepspeed": {
            "fits": not theirs.missing_bytes,
            "lacks_host_bytes": theirs.missing_bytes.get(Tier.HOST, 0),
            "with_160_gb_fits": not roomy.missing_bytes,
            "with_160_gb_iteration_s": roomy.iteration_s,
        },
    }


def main() -> None:
    """Plan for both, and write."""
    write_result(OUTPUT, {**origin(), "cells": [cell(dram_bytes_per_s) for dram_bytes_per_s in DRAM_BYTES_PER_S]})


if __name__ == "__main__":
    main()
