"""Train a plan's model on a file of tokens without a loop of your own, stop, and go on in the data where it stopped.

``python examples/trainer.py local`` does so on a calibrated machine of yours.
"""

import sys
from pathlib import Path

import numpy as np

import ullage

NUM_ITERATIONS = 12


def main(hardware: str) -> None:
    """Plan a small Llama, write some tokens, and train on them."""
    config = ullage.resolve_model("demo-llama").model_copy(update={"num_layers": 3})
    machine = ullage.load_profile(hardware).with_device_memory(70_000_000)
    # Any processor is fast in fp32; with a GPU take bf16.
    plan = ullage.plan(config, hardware=machine, seq_len=64, micro_batch=2, precision="fp32")
    print(f"predicted: {plan.prediction.iteration_s * 1e3:.1f} ms per iteration")

    path = Path("tokens.npy")
    np.save(path, (np.arange(100_000) % 97 % config.vocab_size).astype(np.uint16))
    tokens = np.load(path, mmap_mode="r")  # never read whole
    with ullage.Trainer(plan, data=tokens, lr=1e-3) as trainer:
        for step in trainer.run(NUM_ITERATIONS):
            print(f"iteration {step.iteration}: {step.measured_s * 1e3:.0f} ms, loss {step.loss:.3f}")
        position = trainer.position
        weights = {name: weight.clone() for name, weight in trainer.session.full_parameters().items()}
    print(f"measured: {step.measured_s * 1e3:.1f} ms in the last of them; {len(weights)} parameters trained")

    with ullage.Trainer(plan, trainer.model, data=tokens, position=position) as trainer:  # a new optimizer
        (step,) = trainer.run(1)
    print(f"iteration {NUM_ITERATIONS}: went on at sequence {position}, loss {step.loss:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "epyc-turin-2c")
