"""``ullage models``: the models that are known by name."""

import argparse
from typing import Any

from planner.models.config import ModelConfig
from planner.models.parameters import num_parameters
from planner.models.registry import captured_preset, list_models, resolve_model
from ullage.commands import Subparsers, command_parser
from ullage.output.console import console, facts, table, write_json


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "models",
        run,
        "List the models that are known by name, or show the sizes of one model. Any path of a Hugging Face\n"
        "config.json works as a model too, and so does the hub id of a model in the hub's cache on this machine;\n"
        "nothing is ever downloaded.",
        """
        ullage models
        ullage models facebook/opt-13b
        ullage models path/to/config.json --json
        """,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="name, hub id, or path of a config.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """List, or show one."""
    if args.name is None:
        return _list(as_json=args.json)
    if (captured := captured_preset(args.name)) is not None:
        return _show_captured(*captured, as_json=args.json)
    model = resolve_model(args.name)
    if args.json:
        write_json({**model.model_dump(mode="json"), "num_params": num_parameters(model)})
    else:
        sizes = {name: str(value) for name, value in _sizes(model).items()}
        console().print(facts({"parameters": f"{num_parameters(model):,}", **sizes}))
    return 0


def _show_captured(num_params: int, config: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        write_json({**config, "num_params": num_params})
        return 0
    sizes = {name: str(value) for name, value in config.items()}
    console().print(facts({"parameters": f"{num_params:,}", **sizes, "planned": "from its code, which is captured"}))
    return 0


def _list(*, as_json: bool) -> int:
    models = list_models()
    if as_json:
        write_json(models)
        return 0
    rows = table("models", "name", "parameters")
    for name, count in sorted(models.items(), key=lambda item: item[1]):
        rows.add_row(name, f"{count:,}")
    console().print(rows)
    return 0


def _sizes(model: ModelConfig) -> dict[str, object]:
    """Return all fields, less those of experts where there are none."""
    left_out = set() if model.is_expert_model else {name for name in type(model).model_fields if "expert" in name}
    return model.model_dump(exclude=left_out | {"dense_layers", "normalize_router"})
