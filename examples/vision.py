"""Train a small vision transformer to tell rows from columns, and save it for `from_pretrained`."""

import torch
from transformers import ViTConfig, ViTForImageClassification

import ullage

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=2, **sizes)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def drawn(num: int = 16) -> dict[str, torch.Tensor]:
    """Return images of bright rows or columns, with some noise, and which of them they are."""
    labels = torch.randint(2, (num,))
    rows = (torch.arange(32) % 8 < 4).float().expand(num, 3, 32, 32)
    images = torch.where(labels[:, None, None, None] == 1, rows, rows.transpose(2, 3))
    return {"pixel_values": images + 0.1 * torch.randn(images.shape), "labels": labels}


model, optimizer = ullage.prepare(model, optimizer, drawn(), device_memory="5MB")  # leave out: all that is free
print(optimizer.plan)
for _ in range(15):
    loss = model(**drawn()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")

ullage.save(optimizer, "tuned")
optimizer.session.close()  # the model is an ordinary one again
saved = ViTForImageClassification.from_pretrained("tuned")
images = drawn()["pixel_values"]
print("same classes:", torch.equal(model.eval()(images).logits.argmax(1), saved.eval()(images).logits.argmax(1)))
