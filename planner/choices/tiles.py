"""How many tokens a tile of the loss has, where it is not given.

[Note: Tiles] For each token, logits take 1.8 MB with a vocabulary of 128,256 entries in bf16, conversions and gradients
included. Tiles ([Note: Tiled logits] in :mod:`executor.module.tiled_logits`) need far less. They cost one more product
of the head, and the weight's gradient becomes a sum over tiles, rounded at each. So tiles are compared with whole
logits only if whole ones take a tenth of the device's memory. A tile need not be smaller than the memory that another
unit needs at its peak, because that unit would bind then.
"""

from hwprofiles.profile import Device
from planner.choices.choice import Choice
from planner.graph import Batch, Unit
from planner.models.captured import CapturedModel, Model
from planner.models.formulas.ends import tiled_logit_bytes
from planner.models.sharding import share

_WORTH = 0.1  # a share of the device's memory
# Tokens of a tile, by kind of device. With fewer, a product takes longer to read the head's weight than to compute.
_LEAST_TOKENS = {"gpu": 256, "host": 32}


def can_be_tiled(model: Model) -> bool:
    """Return whether a model's loss can be computed in tiles."""
    return not isinstance(model, CapturedModel) or model.num_logits is not None


def tile_of(model: Model, batch: Batch, units: tuple[Unit, ...], device: Device) -> int | None:
    """Return the tokens of a tile that are worth comparing with whole logits; ``None`` if none are.

    Args:
        model: the model.
        batch: one micro-batch of it, with whole logits.
        units: its units for that.
        device: what computes.
    """
    num_logits = model.num_logits if isinstance(model, CapturedModel) else share(model, batch).vocab_size
    if num_logits is None:
        return None
    logit_bytes = num_logits * tiled_logit_bytes(batch.tensor_parallel, batch.dtype_bytes)
    if batch.num_tokens * logit_bytes < _WORTH * device.memory_bytes.value:
        return None
    other_bytes = max(unit.saved_bytes + unit.workspace_bytes for unit in units[:-1])
    tokens = _LEAST_TOKENS[device.kind]
    while 2 * tokens * logit_bytes <= other_bytes:
        tokens *= 2
    return tokens if tokens < batch.num_tokens else None


def with_tile(choice: Choice, tokens: int, num_tokens: int) -> Choice:
    """Return a choice whose loss is computed in tiles; as it is, if a tile would have all tokens of a micro-batch."""
    return choice.model_copy(update={"loss_tile_tokens": tokens}) if tokens < num_tokens else choice
