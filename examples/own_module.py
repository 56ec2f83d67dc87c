"""Train a module of your own: capture it without its memory, plan it, prepare it, keep your loop.

An MLP-Mixer that no preset knows. Any profile of kind ``host`` runs without a GPU; with a GPU, calibrate it and name
it: ``python examples/own_module.py local``. From the command line, with this file in the current directory:

    ullage plan --model own_module:make --input-shape 8x3x64x64 8:int64
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import ullage

NUM_ITERATIONS, NUM_CLASSES, WIDTH, NUM_PATCHES = 8, 10, 128, 64


class Mlp(nn.Module):
    """Two projections."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the last dimension."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Mixes patches, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.patches = nn.LayerNorm(WIDTH), Mlp(NUM_PATCHES, 2 * NUM_PATCHES)
        self.norm2, self.channels = nn.LayerNorm(WIDTH), Mlp(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next block is given."""
        x = x + self.patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Images and labels in, the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        x = self.blocks(self.patch(images).flatten(2).transpose(1, 2))
        return functional.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def make() -> nn.Module:
    """Make the module; what ``--model own_module:make`` calls."""
    return Mixer()


def main(hardware: str) -> None:
    """Capture, plan, prepare and train on one random batch."""
    machine = ullage.load_profile(hardware).with_device_memory(16_000_000)
    captured = ullage.capture_module(make, ["8x3x64x64", "8:int64"], as_on_gpu=machine.device.kind == "gpu")
    print(f"captured: {captured.num_params:,} parameters, {captured.forward_flop / 1e9:.2f} GFLOP forward")
    plan = ullage.plan(captured, hardware=machine)
    print(f"predicted: {plan.prediction.iteration_s * 1e3:.1f} ms per iteration")

    torch.manual_seed(0)
    model = make()
    model, optimizer = ullage.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan)
    images, labels = torch.randn(8, 3, 64, 64).bfloat16(), torch.randint(NUM_CLASSES, (8,))
    with optimizer.session as session:
        for iteration in range(NUM_ITERATIONS):
            loss = model(images, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(f"iteration {iteration}: loss {loss.item():.3f}")
        timeline = session.timeline()
    print(f"measured: {timeline.period_s(NUM_ITERATIONS - 2) * 1e3:.1f} ms per iteration")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "epyc-turin-2c")
