"""Keep your own training loop: plan a model for a device that cannot hold it, prepare it, train.

The model is an unmodified ``transformers`` GPT-2 with random weights. Any profile of kind ``host`` runs without a GPU;
with a GPU, calibrate it and name it: ``python examples/own_loop.py local``.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ullage

NUM_ITERATIONS = 8


def main(hardware: str) -> None:
    """Plan, prepare and train a small GPT-2 on random tokens."""
    config = AutoConfig.for_model("gpt2", n_layer=3, vocab_size=512, use_cache=False)
    config.save_pretrained("tiny-gpt2")  # a folder of yours has a config.json already
    machine = ullage.load_profile(hardware).with_device_memory(70_000_000)
    # Any processor is fast in fp32; with a GPU take bf16, and dtype=torch.bfloat16 below.
    plan = ullage.plan("tiny-gpt2/config.json", hardware=machine, seq_len=64, micro_batch=2, precision="fp32")
    print(f"predicted: {plan.prediction.iteration_s * 1e3:.1f} ms per iteration")

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
