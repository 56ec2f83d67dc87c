"""An adapter for a transformer of `diffusers` that makes images, as Stable Diffusion 3 does; samples between steps."""

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model

import ullage

torch.manual_seed(0)
sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "caption_projection_dim": 64}
inner = {"sample_size": 16, "patch_size": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
SD3Transformer2DModel(**sizes, **inner).save_pretrained("base")
base = SD3Transformer2DModel.from_pretrained("base")  # your folder
model = get_peft_model(base, LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0", "proj_out"])).train()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)

image = torch.linspace(-1, 1, 16).expand(4, 16, 16, 16)  # latents of a VAE, and a prompt that an encoder has read
prompt = {"encoder_hidden_states": torch.randn(1, 7, 32).repeat(4, 1, 1), "pooled_projections": torch.randn(4, 32)}
batch = {"hidden_states": torch.randn(4, 16, 16, 16), "timestep": torch.rand(4) * 1000, **prompt}
model, optimizer = ullage.prepare(model, optimizer, batch, device_memory="6MB")  # leave out: all that is free
print(optimizer.plan)


@torch.no_grad()
def sample(network: torch.nn.Module, noise: torch.Tensor, num_steps: int = 6) -> torch.Tensor:
    """Return images: from noise, a step after the other along the flow."""
    for number in range(num_steps):
        time = torch.full((4,), 1 - number / num_steps)
        noise = noise - network(hidden_states=noise, timestep=time * 1000, **prompt).sample / num_steps
    return noise


noise = torch.randn_like(image)
print("before:", (sample(model, noise) - image).abs().mean().item())
for _ in range(16):
    drawn, time = torch.randn_like(image), torch.rand(4)
    mixed = torch.lerp(image, drawn, time.view(4, 1, 1, 1))
    flow = model(hidden_states=mixed, timestep=time * 1000, **prompt).sample
    loss = (flow - (drawn - image)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
ours = sample(model, noise)  # of the prepared model: its weights come to the device once
print("after:", (ours - image).abs().mean().item())

ullage.save(optimizer, "adapter")
optimizer.session.close()  # the model is an ordinary one again
print("same classes:", torch.allclose(sample(model, noise), ours))
