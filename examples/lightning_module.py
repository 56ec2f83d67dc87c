"""A module of Lightning, trained with one more argument of its trainer."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ullage.integrations.lightning

WIDTH = 64


class Classifier(pl.LightningModule):
    """Images in, classes out."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.network = nn.Sequential(nn.Conv2d(3, WIDTH, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.network(images))

    def training_step(self, batch: tuple[Tensor, Tensor], _batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def on_train_batch_end(self, outputs: dict[str, Tensor], *_args: object) -> None:
        """Print the loss."""
        print(f"loss {outputs['loss'].item():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


pl.seed_everything(0, verbose=False)
labels = torch.arange(32) % 4
images = torch.randn(32, 3, 16, 16) * 0.1 + labels.view(-1, 1, 1, 1) * 0.3
strategy = ullage.integrations.lightning.LightningStrategy(device_memory="1MB")  # or "ullage": all that is free
trainer = pl.Trainer(max_epochs=5, strategy=strategy, gradient_clip_val=1.0, enable_progress_bar=False, logger=False)
model = Classifier()
trainer.fit(model, DataLoader(TensorDataset(images, labels), 8, shuffle=True))
print(strategy.plan)

saved = Classifier.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
with torch.no_grad():
    print("same classes:", torch.equal(model(images).argmax(1), saved.to(model.device)(images).argmax(1)))
