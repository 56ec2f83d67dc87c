"""Keep your own training loop: plan a model for a device that cannot hold it, prepare it, train.

The model is an unmodified ``transformers`` GPT-2 with random weights. Any profile of kind ``host`` runs without a GPU;
with a GPU, calibrate it and name it: ``python examples/own_loop.py local``.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ullage
from planner.decisions import FP32
from planner.models import ModelConfig, to_hf_config_dict

NUM_ITERATIONS = 8


def main(hardware: str) -> None:
    """Plan, prepare and train a small GPT-2 on random tokens."""
    config: ModelConfig = ullage.resolve_model("gpt2").model_copy(update={"num_layers": 3, "vocab_size": 512})
    machine = ullage.load_profile(hardware).with_device_memory(70_000_000)
    # Any processor is fast in fp32; with a GPU take BF16, and dtype=torch.bfloat16 below.
    request = ullage.Request(config, machine, seq_len=64, micro_batch=2, precision=FP32)
    plan = ullage.plan(request)
    print(f"predicted: {plan.prediction.iteration_s * 1e3:.1f} ms per iteration")

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config_dict(config)), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_ITERATIONS)
    model, optimizer = ullage.prepare(model, optimizer, plan)

    tokens = torch.randint(0, config.vocab_size, (2, 64))
    with optimizer.session as session:
        for iteration in range(NUM_ITERATIONS):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the stock one, exact
            optimizer.step()
            scheduler.step()
            print(f"iteration {iteration}: loss {loss.item():.3f}")
        timeline = session.timeline()
    print(f"measured: {timeline.period_s(NUM_ITERATIONS - 2) * 1e3:.1f} ms per iteration")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "epyc-turin-2c")
