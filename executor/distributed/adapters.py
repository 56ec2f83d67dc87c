"""Adapters of ``peft``: which option differs if a model does not match a plan, and adapters of parameters.

With ``target_parameters``, each forward of ``peft`` registers a parametrization: it makes modules, and sets the
parameter to itself, which a planned model refuses. What the module then reads is the adapted weight. So in its forward
that is put into the module's ``__dict__``, where Python looks first. Nothing else changes.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final, Self
from unittest import mock

from torch import nn
from torch.nn.utils import parametrize

from executor.callbacks import replace_attribute

_SHOWN: Final = 5
_PART: Final = re.compile(
    r"(?P<target>.*)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"\.(?P<adapter>[^.]+)(\.weight)?"
)
_COPIED: Final = re.compile(r"(?P<module>.*)\.modules_to_save\.[^.]+\..*")


@dataclasses.dataclass(frozen=True)
class _Adapters:
    """The adapters that ``peft`` has put into a model.

    Attributes:
        ranks: rank of each adapter, by the path of its projection.
        names: names of the adapters.
        dora: whether they also scale the projection's columns.
        copied: names of modules that are trained whole.
    """

    ranks: Mapping[str, int]
    names: frozenset[str]
    dora: bool
    copied: frozenset[str]

    @classmethod
    def among(cls, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Return the adapters among parameters with these names and shapes."""
        parts = {name: part for name in shapes if (part := _PART.fullmatch(name))}
        return cls(
            {p["target"]: shapes[name][0] for name, p in parts.items() if p["kind"] in {"lora_A", "lora_embedding_A"}},
            frozenset(part["adapter"] for part in parts.values()),
            any(part["kind"] == "lora_magnitude_vector" for part in parts.values()),
            frozenset(_last(part["module"]) for name in shapes if (part := _COPIED.fullmatch(name))),
        )

    def __str__(self) -> str:
        """Return the adapters in words."""
        return f"LoRA adapters of rank {_listed(set(self.ranks.values()))} on {_shown(self.ranks)}"

    @property
    def option(self) -> str:
        """The command-line option that plans such adapters."""
        return f"--lora rank={_listed(set(self.ranks.values()))},targets={'+'.join(_targets(self.ranks))}"


def difference(planned: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return in words which option of ``peft`` differs, and what to do; ``None`` if none differs.

    Args:
        planned: shapes of the plan's parameters, by name.
        found: shapes of the model's parameters, by name.
    """
    plan, model = _Adapters.among(planned), _Adapters.among(found)
    if plan.ranks and not model.ranks:
        return (
            f"the plan has {plan}, but the model has none; prepare the result of peft.get_peft_model, or plan "
            "without --lora"
        )
    if model.ranks and not plan.ranks:
        return f"the model has {model}, but the plan has none; plan with {model.option}"
    return _difference_of_adapters(plan, model) or _difference_of_options(plan, model)


def _difference_of_adapters(plan: _Adapters, model: _Adapters) -> str | None:
    """Return in words how adapters differ in name, place or rank."""
    if plan.names != model.names:
        return (
            f"the model's adapter is named {_listed(model.names)}, but {_listed(plan.names)} in the plan; leave "
            "adapter_name out of peft.get_peft_model"
        )
    for ours, theirs, words in ((model.ranks, plan.ranks, "model"), (plan.ranks, model.ranks, "plan")):
        if further := {path: rank for path, rank in ours.items() if path not in theirs}:
            other = "plan" if words == "model" else "model"
            return (
                f"the {words} has LoRA adapters on {_shown(further)}, but the {other} has none there; make the model "
                f"with the plan's LoraConfig(target_modules={_targets(plan.ranks)}), or plan with {model.option}"
            )
    if plan.ranks != model.ranks:
        path = next(path for path in plan.ranks if plan.ranks[path] != model.ranks[path])
        return (
            f"the model's LoRA adapters have rank {model.ranks[path]}, but {plan.ranks[path]} in the plan; make the "
            f"model with LoraConfig(r={plan.ranks[path]}), or plan with {model.option}"
        )
    return None


def _difference_of_options(plan: _Adapters, model: _Adapters) -> str | None:
    """Return in words which other option differs: DoRA, or modules that are trained whole."""
    if plan.dora != model.dora:
        return (
            f"the model was made with LoraConfig(use_dora={model.dora}), but the plan with use_dora={plan.dora}; make "
            "the model with the plan's option, or prepare it with an example batch instead of the plan"
        )
    if plan.copied != model.copied:
        return (
            f"the model was made with LoraConfig(modules_to_save={sorted(model.copied)}), but the plan with "
            f"{sorted(plan.copied)}; make the model with the plan's option, or prepare it with an example batch "
            "instead of the plan"
        )
    return None


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _targets(paths: Collection[str]) -> list[str]:
    return sorted({_last(path) for path in paths})


def _shown(paths: Collection[str]) -> str:
    names = _targets(paths)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _listed(values: Collection[object]) -> str:
    return " and ".join(map(str, sorted(values, key=str)))


def bind_adapted_parameters(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Let adapters of parameters show adapted weights; yield functions that undo it."""
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft."):
            yield replace_attribute(module, "_activate_lora", _showing(module._activate_lora))
            yield replace_attribute(module, "_remove_parametrizations", lambda: None)


def _showing(activate: Any) -> Callable[[list[str]], contextlib.AbstractContextManager[None]]:
    """Return what takes the place of a wrapper's ``_activate_lora``, a context: there the module reads its results."""

    @contextlib.contextmanager
    def show_adapted(adapters: list[str]) -> Iterator[None]:
        undo: list[Callable[[], None]] = []

        def show(base: nn.Module, name: str, proxy: nn.Module) -> None:
            parameter = getattr(base, name)
            undo.append(replace_attribute(base, name, proxy(parameter)))
            undo.append(replace_attribute(base, "parametrizations", {name: SimpleNamespace(original=parameter)}))

        try:
            with contextlib.ExitStack() as stack:
                with mock.patch.object(parametrize, "register_parametrization", show):
                    stack.enter_context(activate(adapters))
                yield
        finally:
            for each in reversed(undo):
                each()

    return show_adapted
