"""``ullage models``: the models that are known by name, and the sizes of any model."""

import argparse
from typing import Any

from planner.models.captured import CapturedModel
from planner.models.config import ModelConfig, NoFormulasError
from planner.models.parameters import num_parameters
from planner.models.registry import captured_preset, configuration, list_models, resolve_model, source_of
from ullage.cli.arguments import lora
from ullage.cli.options import QUANTIZATIONS, Options, check_adapters
from ullage.cli.request import model_named
from ullage.output.formatting import si
from ullage.report.charts import Table
from ullage.report.terminal import answer

_WEIGHT_BYTES = 2  # bytes of one weight in bf16


DESCRIPTION = """\
List the models that are known by name, or show the sizes of one model. NAME can also be the path of a
Hugging Face config.json, or the hub id of a model in the hub's cache on this machine; nothing is
downloaded. With --lora, show the trained parameters, and the bytes of the frozen parameters in bf16."""
EXAMPLES = """
    ullage models
    ullage models facebook/opt-13b
    ullage models path/to/config.json --json
    ullage models llama-3-8b --lora rank=16 --quantize nf4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "model", nargs="?", metavar="NAME", help="name, hub id, or path of a config.json of any architecture"
    )
    parser.add_argument(
        "--lora", type=lora, metavar="rank=N[,...]", help="with LoRA adapters, as `ullage plan --lora` takes them"
    )
    parser.add_argument(
        "--quantize", choices=QUANTIZATIONS, help="with the frozen projections of --lora quantized: nf4 or int8"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """List all models, or show one."""
    if args.model is None:
        if args.lora or args.quantize:
            raise ValueError("--lora and --quantize need a model; give its name too")
        counts = list_models()
        data = {name: {"num_params": count, "source": source_of(name)} for name, count in counts.items()}
        ordered = sorted(counts.items(), key=lambda item: item[1])
        rows = tuple((name, f"{count:,}", source_of(name)) for name, count in ordered)
        shown: Table | dict[str, str] = Table("models", ("name", "parameters", "source of its sizes"), rows)
    else:
        check_adapters(Options(model=args.model, lora=args.lora, quantize=args.quantize))
        data, shown = _adapted(args) if args.lora is not None else _one(args.model)
    answer(args, data, shown)
    return 0


def _one(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sizes of a model as data and in words."""
    how = {"planned": "from its code, which is captured"}
    if (preset := captured_preset(name)) is not None:
        num_params, sizes = preset
        shown = sizes
    else:
        try:
            model = resolve_model(name)
            num_params, sizes, shown, how = num_parameters(model), model.model_dump(mode="json"), _sizes(model), {}
        except NoFormulasError:
            num_params, sizes = _captured(name).num_params, configuration(name)
            shown = sizes
    rest = {"source": source_of(name)}
    words = {key: str(value) for key, value in shown.items()}
    return {**sizes, "num_params": num_params, **rest}, {"parameters": f"{num_params:,}", **words, **how, **rest}


def _adapted(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the trained and the frozen parameters of a model with adapters, as data and in words."""
    model = _captured(args.model, lora=args.lora, quantization=args.quantize)
    frozen = [spec for operator in model.operators() for spec in operator.parameters if not spec.is_trained]
    num_frozen = sum(spec.num_params for spec in frozen)
    frozen_bytes = sum(spec.stored_bytes(_WEIGHT_BYTES) for spec in frozen)
    words = {"trained": f"{model.num_trained:,}", "frozen": f"{num_frozen:,} in {si(frozen_bytes, 'B')}"}
    data = {"num_trained": model.num_trained, "num_frozen": num_frozen, "frozen_bytes": frozen_bytes}
    return data, {"model": model.name, **words}


def _captured(name: str, **adapters: Any) -> CapturedModel:
    model = model_named(name, None, None, "bf16", **adapters, as_on_gpu=True)
    assert isinstance(model, CapturedModel)
    return model


def _sizes(model: ModelConfig) -> dict[str, object]:
    """Return all fields, without those of experts if the model has none."""
    left_out = set() if model.is_expert_model else {name for name in type(model).model_fields if "expert" in name}
    return model.model_dump(exclude=left_out | {"dense_layers", "normalize_router"})
