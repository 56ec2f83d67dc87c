"""Check arguments of ``prepare`` and ``offloaded`` before anything is measured or planned."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from torch import Tensor, nn

from hwprofiles.profile import HardwareProfile
from planner.terms import Storage

_WRAPPERS: Final = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_amount(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool) and value >= 1)


def _are_cores(value: object) -> bool:
    return value in ("auto", "free") or (isinstance(value, tuple) and all(_is_whole(core, 0) for core in value))


_FLAG: Final = (lambda value: isinstance(value, bool), "True or False")
_RULES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "hardware": (
        lambda value: value is None or isinstance(value, str | Path | HardwareProfile),
        "the name or path of a profile, or a profile from ullage.load_profile",
    ),
    "device_memory": (
        lambda value: value is None or _is_amount(value),
        "a number of bytes of at least 1, or a text like '8GB'",
    ),
    "num_micro_batches": (lambda value: _is_whole(value, 1), "a whole number of at least 1"),
    "pipeline": (lambda value: value is None or _is_whole(value, 1), "a whole number of at least 1"),
    "collectives": (lambda value: value in (None, "fabric", "host"), "'fabric' or 'host'"),
    "clip": (_FLAG[0], "True or False: whether your loop clips gradients by their norm"),
    "speculate": _FLAG,
    "storage": (lambda value: value in get_args(Storage), f"one of {', '.join(get_args(Storage))}"),
    "storage_dir": (
        lambda value: value is None or (isinstance(value, str | Path) and not Path(value).is_file()),
        "a folder",
    ),
    "compile_blocks": _FLAG,
    "cores": (_are_cores, "'auto', 'free', or a tuple of the numbers of cores"),
    "audit": (
        lambda value: value in ("first", "off") or _is_whole(value, 1),
        "'first', 'off', or a number of iterations",
    ),
    "checkpoint_buffer_bytes": (lambda value: _is_whole(value, 0), "a whole number of bytes of at least 0"),
}


def check_options(caller: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Check options of a call that plans or executes.

    Args:
        caller: name of the called function.
        given: the given options.
        known: names of all options of the function.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option has a wrong value.
    """
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"{caller}() has no option {unknown[0]}; use one of {', '.join(known)}")
    for name, value in given.items():
        holds, words = _RULES.get(name, (lambda _: True, ""))
        if not holds(value):
            shown = str(value) if isinstance(value, Path) else repr(value)
            raise ValueError(f"{name} is {shown}, but must be {words}")


def check_trainable(model: nn.Module) -> None:
    """Check that no part of a model is wrapped, and that it has trainable parameters.

    Raises:
        ValueError: a part is in a wrapper for several devices, or all parameters are frozen.
    """
    for path, module in model.named_modules():
        kind = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
        if kind is not None and not (path and kind == "DataParallel"):  # inside, one device passes calls on
            raise ValueError(
                f"{path or 'the model'} is in a {kind}, but the plan itself divides work among devices; give the "
                "model without it (model.module), and start one process for each device with torchrun"
            )
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"all {len(parameters)} parameters of the {type(model).__name__} are frozen; call requires_grad_(True) on "
            "those to train, put adapters in (peft.get_peft_model), or give None as the optimizer to evaluate it only"
        )


def check_tokens(model: nn.Module, batch: object) -> None:
    """Check that a model knows the tokens of an example batch. PyTorch's own error has no name and no number.

    Models with images are not checked: they may have image tokens beyond their vocabulary.

    Raises:
        ValueError: the batch has a token beyond the vocabulary.
    """
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or not tokens.numel() or not isinstance(size, int):
        return
    if hasattr(config, "vision_config"):
        return
    found = [int(token) for token in tokens.aminmax() if not 0 <= token < size]
    if found:
        raise ValueError(
            f"input_ids of the example batch has {found[0]}, but the model knows tokens 0 to {size - 1}; give the "
            "tokens of its own tokenizer, or resize its embeddings"
        )
