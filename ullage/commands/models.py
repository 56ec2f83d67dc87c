"""``ullage models``: the models that are known by name, and the sizes of any model."""

import argparse
from typing import Any

from planner.models.captured import CapturedModel
from planner.models.config import ModelConfig, NoFormulasError
from planner.models.parameters import num_parameters
from planner.models.registry import captured_preset, configuration, list_models, resolve_model, source_of
from ullage.cli.arguments import lora
from ullage.cli.options import QUANTIZATIONS, check_adapters
from ullage.cli.request import Adapters, model_named
from ullage.commands import Subparsers, command_parser
from ullage.output.console import console, facts, table, write_json
from ullage.output.formatting import si

_WEIGHT_BYTES = 2  # bytes of one weight in bf16


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "models",
        run,
        "List the models that are known by name, or show the sizes of one model. NAME can also be the path of a\n"
        "Hugging Face config.json, or the hub id of a model in the hub's cache on this machine; nothing is\n"
        "downloaded. With --lora, show the trained parameters, and the bytes of the frozen parameters in bf16.",
        """
        ullage models
        ullage models facebook/opt-13b
        ullage models path/to/config.json --json
        ullage models llama-3-8b --lora rank=16 --quantize nf4
        """,
    )
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
        return _list(as_json=args.json)
    check_adapters(args)
    if args.lora is not None:
        return _show_adapted(_captured(args.model, Adapters(args.lora, args.quantize)), as_json=args.json)
    if (preset := captured_preset(args.model)) is not None:
        return _show_captured(*preset, source_of(args.model), as_json=args.json)
    try:
        model = resolve_model(args.model)
    except NoFormulasError:
        num_params = _captured(args.model, Adapters()).num_params
        return _show_captured(num_params, configuration(args.model), source_of(args.model), as_json=args.json)
    source = source_of(args.model)
    if args.json:
        write_json({**model.model_dump(mode="json"), "num_params": num_parameters(model), "source": source})
    else:
        sizes = {name: str(value) for name, value in _sizes(model).items()}
        console().print(facts({"parameters": f"{num_parameters(model):,}", **sizes, "source": source}))
    return 0


def _captured(name: str, adapters: Adapters) -> CapturedModel:
    model = model_named(name, None, None, "bf16", adapters, as_on_gpu=True)
    assert isinstance(model, CapturedModel)
    return model


def _show_adapted(model: CapturedModel, *, as_json: bool) -> int:
    specs = [spec for operator in model.operators() for spec in operator.parameters]
    frozen = [spec for spec in specs if not spec.is_trained]
    num_frozen = sum(spec.num_params for spec in frozen)
    frozen_bytes = sum(spec.stored_bytes(_WEIGHT_BYTES) for spec in frozen)
    if as_json:
        write_json({"num_trained": model.num_trained, "num_frozen": num_frozen, "frozen_bytes": frozen_bytes})
        return 0
    frozen_text = f"{num_frozen:,} in {si(frozen_bytes, 'B')}"
    console().print(facts({"model": model.name, "trained": f"{model.num_trained:,}", "frozen": frozen_text}))
    return 0


def _show_captured(num_params: int, config: dict[str, Any], source: str, *, as_json: bool) -> int:
    if as_json:
        write_json({**config, "num_params": num_params, "source": source})
        return 0
    sizes = {name: str(value) for name, value in config.items()}
    planned = "from its code, which is captured"
    console().print(facts({"parameters": f"{num_params:,}", **sizes, "planned": planned, "source": source}))
    return 0


def _list(*, as_json: bool) -> int:
    models = list_models()
    if as_json:
        write_json({name: {"num_params": count, "source": source_of(name)} for name, count in models.items()})
        return 0
    rows = table("models", "name", "parameters", "source of its sizes", text={2})
    for name, count in sorted(models.items(), key=lambda item: item[1]):
        rows.add_row(name, f"{count:,}", source_of(name))
    console().print(rows)
    return 0


def _sizes(model: ModelConfig) -> dict[str, object]:
    """Return all fields, without those of experts if the model has none."""
    left_out = set() if model.is_expert_model else {name for name in type(model).model_fields if "expert" in name}
    return model.model_dump(exclude=left_out | {"dense_layers", "normalize_router"})
