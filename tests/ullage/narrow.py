"""A model that the cores of any machine train in hundredths of a second, for tests of what is around training."""

from planner.models import ModelConfig, resolve_model


def narrow_llama(num_layers: int, **sizes: int) -> ModelConfig:
    """Return ``demo-llama`` of half its width and so many layers: a quarter of the work, and of the bytes."""
    width = {"hidden_size": 256, "ffn_hidden_size": 704, "head_dim": 32, "word_embed_proj_dim": 256}
    return resolve_model("demo-llama").model_copy(update=width | {"num_layers": num_layers} | sizes)
