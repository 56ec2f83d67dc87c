"""Do architectures of ``transformers`` train under a plan as in memory? ``python benchmarks/capture/architectures.py``.

Each is made at a tiny size from its ``config.json``, as a user would give it. It is captured and planned for a device
with less memory than training takes, and trained under that plan and in memory, with the same random numbers. Names
after the command choose some of them, and nothing is written.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers

import ullage
from benchmarks.capture.tiny import TINY
from benchmarks.origin import origin, write_result
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models.captured import CapturedInput, CapturedModel
from planner.plan.document import Plan
from planner.plan.planning import InfeasibleError, make_plan
from planner.schedule.tasks import MemoryClass
from ullage.capture import capture
from ullage.capture.architectures import Architecture, architecture
from ullage.capture.recording import find_loss
from ullage.training.batches import random_input

BOUND: Final = 1e-4
"""Most that a loss, relative to itself, or a weight may differ after training."""

NUM_STEPS: Final = 20
MICRO_BATCH, SEQ_LEN = 2, 32
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the memory that training without a plan takes, until a plan fits
_STATE_BYTES = 8  # of a parameter: two values of AdamW
_SIMULATIONS = 20
_OUTPUT = Path(__file__).parents[1] / "results" / "architectures.json"


def described(name: str, folder: Path) -> Architecture:
    """Write the ``config.json`` of a tiny architecture, and read it as a user's."""
    sizes = TINY[name]
    config = transformers.AutoConfig.for_model(name.partition(",")[0], **sizes)
    data = config.to_dict() | {"architectures": sizes.get("architectures")}
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    return architecture(folder)


def row(name: str, folder: Path, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Capture, plan and train one of them, in this process."""
    found = described(name, folder)
    seq_len = found.seq_len(SEQ_LEN if found.kind.has_tokens else None, SEQ_LEN)
    begin_s = time.perf_counter()
    captured = capture(str(folder), found.inputs(MICRO_BATCH, seq_len), "fp32", as_on_gpu=False)
    capture_s = time.perf_counter() - begin_s
    plan, ample_bytes = tight_plan(captured)
    expected, weights = trained(found, captured.inputs, None, num_steps)
    losses, planned_weights = trained(found, captured.inputs, plan, num_steps)
    return {
        "architecture": name,
        "class": type(found.make()).__name__,
        "inputs": [str(spec) for spec in captured.inputs],
        "num_params": captured.num_params,
        "num_params_of_model": sum(p.numel() for p in found.make().parameters()),
        "memory_bytes": plan.gpu_memory.peak_bytes,
        "memory_share": plan.gpu_memory.peak_bytes / ample_bytes,
        "capture_s": round(capture_s, 2),
        "first_loss": expected[0],
        "last_loss": expected[-1],
        "loss_error": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "weight_error": max(float((planned_weights[path] - weights[path]).abs().max()) for path in weights),
    }


def tight_plan(captured: CapturedModel) -> tuple[Plan, int]:
    """Return a plan for the smallest share of the memory that holds one, and the bytes without a plan."""
    machine = load_profile("epyc-turin-2c")

    def planned(num_bytes: int | None) -> Plan:
        hardware = machine.with_device_memory(num_bytes) if num_bytes else machine
        request = Request(
            captured,
            hardware,
            seq_len=captured.seq_len,
            micro_batch=captured.micro_batch,
            precision="fp32",
            storage="activations",
            subgroup_params=10_000,
        )
        return make_plan(request, max_simulations=_SIMULATIONS)

    memory = planned(None).gpu_memory  # of which the optimizer's state may be on the host all the same
    state_bytes = _STATE_BYTES * captured.num_trained - memory.by_class.get(MemoryClass.OPTIMIZER, 0)
    ample = memory.peak_bytes + max(state_bytes, 0)
    for share in _SHARES:
        try:
            return planned(int(share * ample)), ample
        except InfeasibleError:
            continue
    raise InfeasibleError("no plan fits", {}, f"give more than {_SHARES[-1]:.0%} of the memory", proven=False)


def trained(
    found: Architecture, inputs: tuple[CapturedInput, ...], plan: Plan | None, num_steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train under a plan, or in memory; return losses and weights."""
    torch.manual_seed(7)
    model = found.make().train()
    # The bias of a key has no gradient but what rounding leaves, which Adam with a smaller epsilon would follow.
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-6)
    if plan:
        model, optimizer = ullage.prepare(model, optimizer, plan)
    losses = []
    torch.manual_seed(11)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        batch = {spec.name: random_input(spec, torch.float32, generator) for spec in inputs}
        loss = find_loss(model(**batch))[0]
        loss.backward()  # type: ignore[no-untyped-call]
        if plan:
            optimizer.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if plan is None:
        return losses, {path: parameter.detach() for path, parameter in model.named_parameters()}
    with optimizer.session as session:
        return losses, session.full_parameters()


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row of each, printed."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = row(name, Path(folder))
            except Exception as error:  # noqa: BLE001 - one that fails is a row too
                found = {"architecture": name, "refused": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)
        yield found


def main() -> None:
    """Run all, and write what was found."""
    torch.set_num_threads(1)
    began, chosen = origin("torch", "transformers"), sys.argv[1:]
    found = list(rows(chosen or list(TINY)))
    done = [entry for entry in found if "refused" not in entry]
    result = {
        **began,
        "batch": {"micro_batch": MICRO_BATCH, "seq_len": SEQ_LEN},
        "num_steps": NUM_STEPS,
        "bound": BOUND,
        "num_architectures": len(found),
        "num_refused": len(found) - len(done),
        "largest_loss_error": max(entry["loss_error"] for entry in done),
        "largest_weight_error": max(entry["weight_error"] for entry in done),
        "median_memory_share": sorted(entry["memory_share"] for entry in done)[len(done) // 2],
        "architectures": found,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "architectures"}))
    if not chosen:
        write_result(_OUTPUT, result)


if __name__ == "__main__":
    main()
