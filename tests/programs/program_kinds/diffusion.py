"""Models of diffusers, with the losses of its training scripts."""

import diffusers
import torch
import torch.nn.functional as F
from program_catalogue import Trained, registry, seeded, train

PROGRAMS, program = registry()


def latents(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(step))


@program
def unconditional_unet(ullage) -> Trained:
    """UNet2DModel predicts noise."""
    model = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(32, 32), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    schedule = diffusers.DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    noisy = latents(0, 2, 3, 16, 16)
    model, optimizer = ullage.prepare(model, optimizer, (noisy, torch.tensor([3, 700])))
    losses = []
    for step in range(3):
        clean, noise = latents(step, 2, 3, 16, 16), latents(step + 50, 2, 3, 16, 16)
        times = torch.randint(1000, (2,), generator=seeded(step))
        loss = F.mse_loss(model(schedule.add_noise(clean, noise, times), times).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def text_unet(**more):
    return diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), norm_num_groups=8, layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **more,
    )  # fmt: skip


@program
def text_to_image(ullage) -> Trained:
    """Stable Diffusion's UNet."""
    batch = lambda step: {
        "sample": latents(step, 2, 4, 16, 16), "timestep": torch.tensor([1, 500]),
        "encoder_hidden_states": latents(step + 9, 2, 7, 32),
    }  # fmt: skip
    return train(ullage, text_unet(), batch, loss=lambda out: out.sample.square().mean(), num_steps=3)


@program
def text_to_image_with_lora(ullage) -> Trained:
    """Stable Diffusion's UNet with LoRA, as in train_text_to_image_lora.py."""
    import peft

    model = text_unet().requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    batch = lambda step: {
        "sample": latents(step, 2, 4, 16, 16), "timestep": torch.tensor([1, 500]),
        "encoder_hidden_states": latents(step + 9, 2, 7, 32),
    }  # fmt: skip
    return train(ullage, model, batch, loss=lambda out: out.sample.square().mean(), num_steps=3)


@program
def sdxl(ullage) -> Trained:
    """SDXL's UNet, whose conditions come in a dict."""
    model = text_unet(
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=80
    )

    def batch(step: int):
        added = {"text_embeds": latents(step + 3, 2, 32), "time_ids": torch.randint(64, (2, 6)).float()}
        return {
            "sample": latents(step, 2, 4, 16, 16), "timestep": torch.tensor([1, 500]),
            "encoder_hidden_states": latents(step + 9, 2, 7, 32), "added_cond_kwargs": added,
        }  # fmt: skip

    return train(ullage, model, batch, loss=lambda out: out.sample.square().mean(), num_steps=3)


@program
def stable_diffusion_3(ullage) -> Trained:
    """SD3's transformer, with flow matching."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip
    batch = lambda step: {
        "hidden_states": latents(step, 2, 4, 16, 16), "encoder_hidden_states": latents(step + 1, 2, 7, 32),
        "pooled_projections": latents(step + 2, 2, 16), "timestep": torch.tensor([20.0, 700.0]),
    }  # fmt: skip
    return train(ullage, model, batch, loss=lambda out: out.sample.square().mean(), num_steps=3)


@program
def flux(ullage) -> Trained:
    """Flux's transformer, some of whose inputs have no batch dimension."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    batch = lambda step: {
        "hidden_states": latents(step, 2, 16, 16), "encoder_hidden_states": latents(step + 1, 2, 7, 32),
        "pooled_projections": latents(step + 2, 2, 16), "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip
    return train(ullage, model, batch, loss=lambda out: out.sample.square().mean(), num_steps=3)


@program
def pixart(ullage) -> Trained:
    """PixArt's transformer, with tables that blocks read first."""
    model = diffusers.PixArtTransformer2DModel(
        sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=4, in_channels=4,
        cross_attention_dim=32, out_channels=8, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip
    batch = lambda step: {
        "hidden_states": latents(step, 2, 4, 16, 16), "encoder_hidden_states": latents(step + 1, 2, 7, 16),
        "timestep": torch.tensor([20, 700]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    return train(ullage, model, batch, loss=lambda out: out.sample.square().mean(), num_steps=3)


@program
def wan(ullage) -> Trained:
    """Wan's transformer of videos."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    batch = lambda step: {
        "hidden_states": latents(step, 2, 4, 2, 8, 8), "timestep": torch.tensor([20, 700]),
        "encoder_hidden_states": latents(step + 1, 2, 7, 16),
    }  # fmt: skip
    return train(ullage, model, batch, loss=lambda out: out.sample.square().mean(), num_steps=3)


@program
def controlnet(ullage) -> Trained:
    """A ControlNet beside a frozen UNet."""
    unet = text_unet().requires_grad_(False)
    control = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8)).train()
    optimizer = torch.optim.AdamW(control.parameters(), lr=1e-3, eps=1e-4)

    def batch(step: int):
        return {
            "sample": latents(step, 2, 4, 16, 16), "timestep": torch.tensor([1, 500]),
            "encoder_hidden_states": latents(step + 9, 2, 7, 32), "controlnet_cond": latents(step + 5, 2, 3, 32, 32),
        }  # fmt: skip

    control, optimizer = ullage.prepare(control, optimizer, batch(0))
    losses = []
    for step in range(3):
        given = batch(step)
        down, mid = control(**given, return_dict=False)
        del given["controlnet_cond"]
        out = unet(**given, down_block_additional_residuals=down, mid_block_additional_residual=mid)
        loss = F.mse_loss(out.sample, latents(step + 70, 2, 4, 16, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, control


@program
def autoencoder(ullage) -> Trained:
    """AutoencoderKL, by its own forward."""
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return train(
        ullage, model, lambda step: (latents(step, 2, 3, 16, 16),), loss=lambda out: out.sample.square().mean()
    )
