"""Families of ``transformers`` that differ most from one another: captured, and trained under a plan as in memory.

Every block is recomputed where that may be, parameters wait on the host where they can, and updates are everywhere: the
same losses, norms and weights to the bit.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
import transformers
from training import ReferenceOptimizer, weights

from executor.module.tiled_layers import tile_modules
from executor.options import Options
from executor.prepare import prepare_session
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, Unit, build_graph, units
from planner.models.captured import CapturedInput
from planner.models.config import ModelConfigError
from planner.schedule.tasks import Op
from ullage.capture import capture_module
from ullage.capture.recording import find_loss

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCABULARY, CLASSES, SUBGROUP_PARAMS = 60, 8, 5000

_SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = _SPECIAL | _ENCODER | {"num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4}
_BOTH_SIDES = {
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPED = {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}

_TEXT = ("input_ids=2x16:int64", "labels=2x16:int64")
_IMAGES = ("pixel_values=2x3x16x16", "labels=2:int64")


def causal(model_type: str, experts: str | None = None, **sizes: object) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        named = {"experts_implementation": experts} if experts else {}
        return transformers.AutoModelForCausalLM.from_config(config, **named)

    return make


FAMILIES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...], str]] = {
    "mixtral in a loop": (causal("mixtral", "eager", **_DECODER | _EXPERTS), _TEXT, "bf16"),
    "mixtral": (causal("mixtral", "grouped_mm", **_DECODER | _EXPERTS), _TEXT, "fp32"),
    "mixtral gathered": (causal("mixtral", "batched_mm", **_DECODER | _EXPERTS), _TEXT, "fp32"),
    "gpt-oss": (causal("gpt_oss", **_DECODER | _EXPERTS), _TEXT, "fp32"),
    "phi-moe in a loop": (causal("phimoe", "eager", **_DECODER | _EXPERTS), _TEXT, "fp32"),
    "jetmoe": (causal("jetmoe", **_DECODER | _EXPERTS | {"kv_channels": 8}), _TEXT, "fp32"),
    "llama 4": (causal("llama4_text", **_DECODER | _EXPERTS | {"intermediate_size_mlp": 64}), _TEXT, "fp32"),
    "deepseek-v3": (
        causal("deepseek_v3", **_DECODER | _EXPERTS | _LATENT | _GROUPED | {"num_key_value_heads": 4, "head_dim": 4}),
        _TEXT,
        "fp32",
    ),
    "qwen3-next": (causal("qwen3_next", **_DECODER | _EXPERTS | _GROUPED | _LINEAR), _TEXT, "fp32"),
    "gemma 3": (causal("gemma3_text", **_DECODER | {"sliding_window": 8}), _TEXT, "bf16"),
    "bloom": (causal("bloom", **_SPECIAL, hidden_size=32, n_layer=2, n_head=4), _TEXT, "fp32"),
    "mamba 2": (
        causal(
            "mamba2",
            **_SPECIAL,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=8,
            state_size=8,
            n_groups=1,
            chunk_size=8,
        ),
        _TEXT,
        "fp32",
    ),
    "whisper": (
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                **_SPECIAL, **_BOTH_SIDES, num_mel_bins=8, max_source_positions=16, decoder_start_token_id=1
            )
        ),
        ("input_features=2x8x32", "labels=2x16:int64"),
        "fp32",
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**_ENCODER, image_size=16, patch_size=4, num_labels=CLASSES)
        ),
        _IMAGES,
        "bf16",
    ),
}


def batch(inputs: tuple[str, ...], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    specs = [CapturedInput.read(text) for text in inputs]
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(dtype)
        if spec.dtype == "float"
        else torch.randint(3, CLASSES, spec.shape, generator=generator)
        for spec in specs
    }


def decided(
    found: tuple[Unit, ...], dtype: str, activations: str = "recompute", layer_tile: int | None = None
) -> Decisions:
    places = itertools.cycle([Place.CPU, Place.STREAM, Place.GPU])
    chosen = {}
    for unit in found:
        update = tuple(next(places) for _ in range(-(-unit.num_params // SUBGROUP_PARAMS)))
        chosen[unit.name] = UnitDecision(
            params="host" if update and Place.GPU not in update else "gpu",
            activations=activations if unit.recompute else "keep",
            update=update,
        )
    precision = Precision(weights=dtype)
    return Decisions(
        policy="test",
        precision=precision,
        micro_batch=2,
        subgroup_params=SUBGROUP_PARAMS,
        clip=True,
        layer_tile_tokens=layer_tile,
        units=chosen,
    )


def units_of(name: str, layer_tile: int | None = None) -> tuple[Unit, ...]:
    make, inputs, dtype = FAMILIES[name]
    captured = capture_module(lambda: make().to(DTYPES[dtype]), inputs, dtype, as_on_gpu=False)
    batch = Batch(2, captured.seq_len, DTYPES[dtype].itemsize, layer_tile_tokens=layer_tile)
    return units(build_graph(captured, batch))


def begun(name: str) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(7)
    make, _, dtype = FAMILIES[name]
    model = make().to(DTYPES[dtype]).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def train(name: str, model: torch.nn.Module, optimizer, num_steps: int = 3) -> list[float]:
    _, inputs, dtype = FAMILIES[name]
    seen = []
    torch.manual_seed(11)
    for step in range(num_steps):
        loss = find_loss(model(**batch(inputs, DTYPES[dtype], step)))[0]
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.part(8)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_captured_and_trains_as_in_memory(name: str) -> None:
    model, optimizer = begun(name)
    expected, expected_weights = train(name, model, ReferenceOptimizer(optimizer)), weights(model)
    found, dtype = units_of(name), FAMILIES[name][2]
    model, optimizer = prepare_session(*begun(name), found, decided(found, dtype), Options(num_threads=1))
    with optimizer.session as session:
        assert train(name, model, optimizer) == expected
        final = session.full_parameters()
        assert not [path for path in final if not torch.equal(final[path], expected_weights[path])]


TILE = 6  # of 32 tokens: the last one is smaller


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("name", "tile"), [("mixtral in a loop", None), ("gpt-oss", None), ("qwen3-next", None), ("gemma 3", TILE)]
)
def test_a_family_offloads_what_was_counted(name: str, tile: int | None) -> None:
    """Also where experts have other shares than equal ones, a bias is added in place, or a system is solved.

    What computes in tiles runs again, and so offloads nothing.
    """
    found, dtype = units_of(name, tile), FAMILIES[name][2]
    assert not any(operator.product_bytes for unit in found for operator in unit.operators if operator.in_tiles)
    decisions = decided(found, dtype, "offload", tile)
    model, optimizer = prepare_session(*begun(name), found, decisions, Options(num_threads=1))
    moved, named = {}, {unit.name: unit for unit in found}
    with optimizer.session as session:
        offloaded = session.runtime.offloaded
        leave = offloaded.offload

        def watched(unit: str, tile: int) -> None:
            leave(unit, tile)
            num_bytes = sum(operator.product_bytes for operator in named[unit].operators)
            assert bool(offloaded._segments[unit].products_of[unit]) == bool(num_bytes)
            moved[unit] = sum(tensor.num_bytes for tensor in offloaded._segments[unit].offloaded(unit))

        offloaded.offload = watched
        train(name, model, optimizer, num_steps=1)
        assert moved == {task.unit: task.num_bytes for task in session.schedule.tasks if task.op is Op.OFFLOAD}


# Norms of torch.nn are one kernel, and these have no modules for their MLPs, or add a residual inside them.
NOT_TILED = {"phi-moe in a loop", "bloom", "whisper"}


@pytest.mark.part(17)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_TILED))
def test_layers_in_tiles_train_as_in_memory(name: str, activations: str) -> None:
    found, dtype = units_of(name, TILE), FAMILIES[name][2]
    names = [operator.name for unit in found for operator in unit.operators if operator.in_tiles]
    assert names
    model, optimizer = begun(name)
    tile_modules([model.get_submodule(path) for path in names], TILE)
    expected, expected_weights = train(name, model, ReferenceOptimizer(optimizer)), weights(model)
    decisions = decided(found, dtype, activations, TILE)
    model, optimizer = prepare_session(*begun(name), found, decisions, Options(num_threads=1))
    with optimizer.session as session:
        assert train(name, model, optimizer) == expected
        final = session.full_parameters()
        assert not [path for path in final if not torch.equal(final[path], expected_weights[path])]


@pytest.mark.part(3)
@pytest.mark.parametrize("name", sorted(NOT_TILED))
def test_a_family_without_norms_and_mlps_of_its_own_has_no_tiles(name: str) -> None:
    with pytest.raises(ModelConfigError, match="no norm or MLP of its layers computes every token independently"):
        units_of(name, TILE)
