"""Training without offload, in plain PyTorch: the ceiling that an offloaded run is compared with."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.models import resolve_model, to_hf_config_dict


def main() -> None:
    """Time bf16 training with a fused AdamW on bf16 weights (no fp32 master: less memory and time than with one)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**to_hf_config_dict(resolve_model(args.model)))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 256, (args.micro_batch, args.seq_len), device="cuda")
    times_s = []
    for _ in range(args.iterations):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - begin_s)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "iteration_s": statistics.median(times_s[3:]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
