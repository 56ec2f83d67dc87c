"""How large tiles are, where it is not given: of the loss, of norms and MLPs, and of sequences that pass a layer.

[Note: Tiles] For each token, logits take 1.8 MB with a vocabulary of 128,256 entries in bf16, conversions and gradients
included; an MLP of Llama-3-8B and its norm take 0.3 MB. Tiles ([Note: Tiled logits] in
:mod:`executor.module.tiled_logits`, [Note: Tiled layers] in :mod:`executor.module.tiled_layers`) need far less. Tiles
of the loss cost one more product of the head. Tiles of layers cost products where a layer is not recomputed; where it
is, its MLP runs again anyway. Weights' gradients become sums over tiles, rounded at each. So tiles are compared with
computing all tokens at once only if that takes a good share of the device's memory. A tile of the loss need not be
smaller than the memory that another unit needs at its peak, because that unit would bind then. A tile of a layer exists
beside what the rest of the layer saves.

Tiles of sequences ([Note: Breadth order] in :mod:`planner.lowering.compute`) make all that a layer needs small, but its
input and output. They cost a pass over the gradients of its weights for each tile, so they are compared where a layer
takes a good share of memory, and are as large as a small share allows.
"""

import dataclasses

from hwprofiles.profile import Device
from planner.decisions import Choice
from planner.graph import Batch, Unit, build_graph, segments
from planner.graph import units as units_of
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfigError
from planner.models.formulas.ends import tiled_logit_bytes
from planner.models.sharding import share

# Tiles are compared if logits, or one layer, take at least such a share of the device's memory: logits, and sequences
# that pass a layer, at least the first one.
_WORTH, _WORTH_OF_LAYERS = 0.1, 0.2
# Tokens of a tile, by kind of device. With fewer, a product takes longer to read its weight than to compute.
_LEAST_TOKENS = {"gpu": 256, "host": 32}
# Tokens of a tile of layers: each adds to the gradients of weights, which is a pass over them.
_LEAST_LAYER_TOKENS = {"gpu": 2048, "host": 128}
_SEGMENT_TILE = 0.1  # of the device's memory: the most that a tile of sequences takes in a layer
_TILE_SHARE = 8  # a tile of a layer may take an eighth of what the rest of its layer takes
_CAPTURED_TILES = 8  # number of tiles of a captured layer, about
_GAIN = 0.8  # captured layers are tiled only if they then need at most such a share of their memory


def can_be_tiled(model: Model) -> bool:
    """Return whether a model's loss can be computed in tiles."""
    return not isinstance(model, CapturedModel) or (model.num_logits is not None and not model.second_order)


def can_have_tiled_layers(model: Model) -> bool:
    """Return whether a model's norms and MLPs may be computed in tiles; if it was captured, another capture says it."""
    if isinstance(model, CapturedModel):
        return model.can_be_recaptured and not model.second_order
    return model.is_gated and model.norm == "rmsnorm" and not model.is_expert_model


def tile_of(model: Model, batch: Batch, units: tuple[Unit, ...], device: Device) -> int | None:
    """Return the tokens of a tile of the loss that are worth comparing with whole logits; ``None`` if none are.

    Args:
        model: the model.
        batch: one micro-batch of it, without tiles.
        units: its units for that.
        device: what computes.
    """
    num_logits = model.num_logits if isinstance(model, CapturedModel) else share(model, batch).vocab_size
    if num_logits is None or not can_be_tiled(model) or batch.kernels == "liger":
        return None
    logit_bytes = num_logits * tiled_logit_bytes(batch.tensor_parallel, batch.dtype_bytes)
    if batch.num_tokens * logit_bytes < _WORTH * device.memory_bytes.value:
        return None
    other_bytes = max((unit.saved_bytes + unit.workspace_bytes for unit in units[:-1]), default=0)
    tokens = _LEAST_TOKENS[device.kind]
    while 2 * tokens * logit_bytes <= other_bytes:
        tokens *= 2
    return tokens if tokens < batch.num_tokens else None


def layer_tile_of(model: Model, batch: Batch, units: tuple[Unit, ...], device: Device) -> int | None:
    """Return the tokens of a tile of layers that are worth comparing with all at once; ``None`` if none are.

    Arguments as for :func:`tile_of`.
    """
    if (
        batch.tensor_parallel > 1
        or batch.fp8_products
        or batch.kernels != "transformers"
        or not can_have_tiled_layers(model)
    ):
        return None
    if (whole_bytes := _layer_bytes(units)) < _WORTH_OF_LAYERS * device.memory_bytes.value:
        return None

    def bytes_with(tokens: int) -> int:
        return _layer_bytes(units_of(build_graph(model, dataclasses.replace(batch, layer_tile_tokens=tokens))))

    tokens = _LEAST_LAYER_TOKENS[device.kind]
    if isinstance(model, CapturedModel):  # each size takes seconds to capture: one only
        tokens = max(tokens, 2 ** (batch.num_tokens // _CAPTURED_TILES).bit_length())
        try:
            return tokens if tokens < batch.num_tokens and bytes_with(tokens) < _GAIN * whole_bytes else None
        except ModelConfigError:  # none of its modules computes every token by itself
            return None
    most_bytes = bytes_with(tokens) * (_TILE_SHARE + 1) // _TILE_SHARE
    while 2 * tokens < batch.num_tokens and bytes_with(2 * tokens) <= most_bytes:
        tokens *= 2
    return tokens if tokens < batch.num_tokens else None


def segment_tile_of(model: Model, batch: Batch, units: tuple[Unit, ...], device: Device) -> int | None:
    """Return the sequences of a tile that are worth comparing with all at once; ``None`` if none are.

    Blocks of captured models may mix sequences (batch norm), so they compute tiles only if that is asked for.
    Arguments as for :func:`tile_of`.
    """
    layer_bytes, size = _layer_bytes(units), batch.micro_batch
    if isinstance(model, CapturedModel) or batch.kernels != "transformers":
        return None
    if layer_bytes < _WORTH * device.memory_bytes.value:
        return None
    most = _SEGMENT_TILE * device.memory_bytes.value / (layer_bytes / batch.micro_batch)
    while size % 2 == 0 and size > most and size // 2 * batch.seq_len >= _LEAST_LAYER_TOKENS[device.kind]:
        size //= 2
    return size if size < batch.micro_batch else None


def _layer_bytes(units: tuple[Unit, ...]) -> int:
    """Return the most bytes that backward of one layer needs if it is recomputed."""
    return max(
        (
            sum(unit.saved_bytes for unit in layer) + max(unit.workspace_bytes for unit in layer)
            for layer in segments(units)
            if layer[0].in_layer
        ),
        default=0,
    )


def with_tiles(
    choice: Choice, num_tokens: int, loss: int | None = None, layers: int | None = None, sequences: int | None = None
) -> Choice:
    """Return a choice with tiles of so many tokens, or sequences, where a micro-batch has more."""
    sizes = (
        ("loss_tile_tokens", loss, num_tokens),
        ("layer_tile_tokens", layers, num_tokens),
        ("segment_tile_sequences", sequences, choice.micro_batch),
    )
    tiles = {field: size for field, size, whole in sizes if size is not None and size < whole}
    return choice.model_copy(update=tiles)
