"""What an audit costs: its time as a share of the first hundred iterations.

    python benchmarks/cpu/audit.py

A small Llama trains in ordinary memory that stands in for a device: under a plan for ample memory, and one for little.
Each is audited in its first iterations, as by default. The share is the audit's own time, over a hundred of the
iterations that follow.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import ullage
from benchmarks.origin import origin, write_result

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
BATCH, LENGTH, VOCABULARY = 2, 256, 4096
_WARM_UP, _COUNTED = 3, 6


def measured(device_memory: str) -> dict[str, object]:
    """Train under a plan for this memory; return what was audited, and what that took."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **SIZES)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.train()
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    model, optimizer = ullage.prepare(model, torch.optim.AdamW(model.parameters()), batch, device_memory=device_memory)
    seconds = []
    with optimizer.session as session:
        for _ in range(_WARM_UP + _COUNTED):
            begin_s = time.perf_counter()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.synchronize()
            seconds.append(time.perf_counter() - begin_s)
        audited = session.audit.result
    assert audited is not None
    iteration_s = statistics.median(seconds[_WARM_UP:])
    return {
        "device_memory": device_memory,
        "plan": str(optimizer.plan),
        "kinds": len(audited.kinds),
        "num_passes": audited.num_passes,
        "largest_difference": audited.largest,
        "audit_s": audited.seconds,
        "iteration_s": iteration_s,
        "share_of_100_iterations": audited.seconds / (100 * iteration_s),
    }


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_audit.json"))
    args = parser.parse_args()
    began = origin("torch", "numba", "numpy", "transformers")
    write_result(args.output, {**began, "results": [measured(memory) for memory in ("2GB", "120MB")]})


if __name__ == "__main__":
    main()
