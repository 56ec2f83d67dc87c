"""A module and a loop of your own: a scheduler, accumulation, and a plan that is saved and used again."""

import torch
from torch import Tensor, nn
from torch.nn import functional

import ullage

NUM_STEPS, WIDTH = 12, 64


class Block(nn.Module):
    """Two projections beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next block is given."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Images and labels in, the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        x = self.blocks(self.patch(images).flatten(2).transpose(1, 2))
        return functional.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model and its optimizer."""
    torch.manual_seed(0)
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """Train on one batch, two micro-batches a step, and return the last loss."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    with optimizer.session:
        for _ in range(NUM_STEPS):
            with model.no_sync():  # may be left out
                (model(*batch) / 2).backward()
            loss = model(*batch)
            (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the stock one, exact
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(f"loss {loss.item():.3f}")
    return loss.item()


batch = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
model, optimizer = ullage.prepare(*made(), batch, num_micro_batches=2, device_memory="1.5MB")
print(optimizer.plan)
optimizer.plan.save("plan.json")
last = trained(model, optimizer, batch)

model, optimizer = ullage.prepare(*made(), ullage.load_plan("plan.json"))
print("same loss:", trained(model, optimizer, batch) == last)
