"""Names and layouts of a model's weights in the files of ``transformers`` and ``peft``.

Files may have other names or another layout of weights than the module: one matrix per expert instead of one tensor of
all experts, or query, key and value in one tensor. ``transformers`` lists the differences for each class, and converts
both ways (:mod:`transformers.core_model_loading`). This module applies its converters to a few tensors at a time, never
to all.
"""

import contextlib
import contextvars
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import nn

from executor.callbacks import replace_attribute

_WRAPPED: Final = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""Names that ``peft`` inserts into the path of a layer that it wraps."""
PROMPT: Final = "prompt_embeddings"
"""The name of the only tensor in ``peft``'s file of a prompt: the output of the prompt's encoder."""
_PROMPTS: Final = frozenset({"PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"})
KEYS_ALONE: Final = contextvars.ContextVar("keys_alone", default=False)
"""Whether only keys of ``state_dict()`` are needed, as when ``peft`` lists modules that are saved whole."""
_PROMPT_METHOD: Final = "get_prompt_embedding_to_save"  # the method of a ``PeftModel`` that computes the prompt


Read = Callable[[str], torch.Tensor]
"""Returns a tensor by its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of some tensors together into one or more new tensors.

    Attributes:
        key: name of the first new tensor.
        sources: for each source tensor, the converter's pattern that it matches, and its name.
        converter: converter of ``transformers``; ``None`` if one tensor is only renamed.
        renamed: returns a new tensor's final name.
        model: the model of ``transformers``.
    """

    key: str
    sources: Sequence[tuple[str, str]]
    converter: Any = None
    renamed: Callable[[str], str] = str
    model: Any = None

    def apply(self, read: Read) -> dict[str, torch.Tensor]:
        """Return the new tensors, by name."""
        if self.converter is None:
            return {self.key: read(self.sources[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.key, name, pattern, lambda name=name: read(name))
        made = converter.convert(self.key, model=self.model, config=self.model.config)
        return {self.renamed(name): value[0] if isinstance(value, list) else value for name, value in made.items()}

    def by_rows(self) -> "list[Conversion] | None":
        """Return one conversion per row if this one stacks tensors as rows; else ``None``."""
        operations = [] if self.converter is None else self.converter.operations
        if not operations or type(operations[0]).__name__ != "MergeModulelist":
            return None
        if operations[0].dim != 0 or not all(_keeps_rows(operation) for operation in operations[1:]):
            return None
        of_pattern: dict[str, list[tuple[str, str]]] = {}
        for source in self.sources:
            of_pattern.setdefault(source[0], []).append(source)
        return [dataclasses.replace(self, sources=row) for row in zip(*of_pattern.values(), strict=True)]


def _keeps_rows(operation: Any) -> bool:
    """Return whether an operation treats each row separately."""
    if type(operation).__name__ == "Transpose":
        return 0 not in {operation.dim0, operation.dim1}
    return type(operation).__name__ == "Concatenate" and operation.dim != 0


@final
class Naming:
    """The names of a model's tensors in files.

    Args:
        model: any module; with adapters of ``peft`` or without.
        whole_shapes: shapes of whole parameters, by ``id(parameter)``, if this rank's shards have other shapes.

    Attributes:
        base: the module without adapters.
        tensors: parameters and buffers that are saved, by each of their names in the model.
        adapters: for each adapter, a mapping from the names in its file to the names in the model. For a prompt, the
            tensor is the embedding of its encoder, which is the prompt itself unless the encoder has further weights.
        in_base: for each tensor of the base model, its name without the additions of ``peft``.
    """

    def __init__(self, model: nn.Module, whole_shapes: Mapping[int, torch.Size]) -> None:
        self._whole_shapes = whole_shapes
        self.base: Any = model
        self.tensors = dict(_saved_tensors(model))
        self.adapters = {
            name: dict(_adapter_names(model, name, self.tensors)) for name in getattr(model, "peft_config", ())
        }
        prefix = ""
        if self.adapters and hasattr(model, "get_base_model"):
            self.base = model.get_base_model()  # type: ignore[operator]
            prefix = next(f"{path}." for path, module in model.named_modules() if module is self.base)
        added = {name for names in self.adapters.values() for name in names.values()}
        self.in_base = {
            name: _WRAPPED.sub("", name.removeprefix(prefix))
            for name in self.tensors
            if name.startswith(prefix) and (name not in added or ".modules_to_save." in name)
        }

    def in_adapter_files(self) -> Iterator[tuple[str, str, str]]:
        """Yield for each adapter tensor: the adapter, the tensor's name in files, and a name of it in the model.

        If there are several adapters, names in files begin with the adapter's folder, as in ``peft``.
        """
        for adapter, names in self.adapters.items():
            folder = f"{adapter}/" if len(self.adapters) > 1 and adapter != "default" else ""
            yield from ((adapter, folder + theirs, name) for theirs, name in names.items())

    def is_encoded(self, adapter: str) -> bool:
        """Return whether an adapter is a prompt that is computed from more weights than its embedding."""
        own = [name for name in self.tensors if name.startswith(f"prompt_encoder.{adapter}.")]
        return PROMPT in self.adapters[adapter] and len(own) > 1

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor, given one of its names in the model."""
        tensor = self.tensors[name]
        return tuple(self._whole_shapes.get(id(tensor), tensor.shape))

    def file_shapes(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the tensors that are saved, on the meta device, by their names in files, as :meth:`to_files` orders.

        Args:
            dtype: data type of parameters. Buffers keep their own.
        """
        held = {
            plain: torch.empty(
                self.shape_of(name),
                dtype=dtype if isinstance(self.tensors[name], nn.Parameter) else self.tensors[name].dtype,
                device="meta",
            )
            for plain, name in self.saved_names().items()
        }
        return {
            name: made
            for conversion in self.to_files(held)
            for name, made in conversion.apply(held.__getitem__).items()
        }

    def of_files(self, found: Collection[str]) -> tuple[list[Conversion], list[str]]:
        """Return the conversions from tensors of files to those of the base model, and unused names in files."""
        expected = {plain: self.tensors[name] for name, plain in self.in_base.items()}
        if not _is_of_transformers(self.base):
            there = [Conversion(name, [("", name)]) for name in found if name in expected]
            return there, [name for name in found if name not in expected]
        from transformers import conversion_mapping, core_model_loading  # noqa: PLC0415 - takes seconds

        mapping = conversion_mapping.get_model_conversion_mapping(self.base)
        renamings, converters = _renamings_and_converters(mapping)
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        conversions: dict[str, Conversion] = {}
        unused = []
        for source in sorted(found, key=core_model_loading.dot_natural_key):
            prefix = self.base.base_model_prefix
            key, pattern = core_model_loading.rename_source_key(source, renamings, converters, prefix, expected)
            if key not in expected and source in expected:
                key, pattern = core_model_loading.rename_source_key(source, [], [], prefix, expected)
            if key not in expected:
                unused.append(source)
                continue
            converter = None if pattern is None else by_pattern[pattern]
            conversion = conversions.setdefault(key, Conversion(key, [], converter, model=self.base))
            conversion.sources.append((pattern or "", source))  # type: ignore[attr-defined]  # a list until it is returned
        self.base._weight_conversions = [transform for transform in mapping if transform.was_used()]
        ignored = _ignored_patterns(self.base)
        return list(conversions.values()), [name for name in unused if not any(re.search(i, name) for i in ignored)]

    def to_files(self, names: Iterable[str]) -> Iterator[Conversion]:
        """Yield the conversions from tensors of the base model (``names``, in their order) to those of files."""
        if not _is_of_transformers(self.base):
            yield from (Conversion(name, [("", name)]) for name in names)
            return
        from transformers import conversion_mapping, core_model_loading  # noqa: PLC0415 - takes seconds

        mapping = getattr(self.base, "_weight_conversions", None)
        if mapping is None:  # do not add a prefix that files did not have
            mapping = conversion_mapping.get_model_conversion_mapping(self.base, add_legacy=False)
            mapping = [each for each in mapping if not isinstance(each, core_model_loading.PrefixChange)]
        renamings, converters = _renamings_and_converters([each.reverse_transform() for each in mapping[::-1]])

        def renamed(name: str) -> str:
            return functools.reduce(lambda found, renaming: renaming.rename_source_key(found)[0], renamings, name)

        conversions: dict[str, Conversion] = {}
        for name in names:
            for converter in converters:
                key, pattern = converter.rename_source_key(name)
                if pattern is not None:
                    break
            else:
                key, pattern, converter = renamed(name), None, None
            conversion = conversions.setdefault(key, Conversion(key, [], converter, renamed, self.base))
            conversion.sources.append((pattern or "", name))  # type: ignore[attr-defined]  # a list until it is returned
        yield from conversions.values()

    def saved_names(self) -> dict[str, str]:
        """Return the tensors of the base model that are saved: the name in the base, and one name in the model."""
        ignored = [re.compile(pattern) for pattern in getattr(self.base, "_keys_to_ignore_on_save", None) or ()]
        saved: dict[str, str] = {}
        seen: set[int] = set()
        for name, plain in self.in_base.items():
            if id(self.tensors[name]) in seen or ".modules_to_save." in name:
                continue
            if any(pattern.search(plain) for pattern in ignored):
                continue
            seen.add(id(self.tensors[name]))
            saved[plain] = name
        return saved


def _is_of_transformers(model: nn.Module) -> bool:
    return callable(getattr(model, "from_pretrained", None)) and hasattr(model, "base_model_prefix")


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``state_dict()`` (tied tensors under each name), without reading values from a session."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + name, parameter
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def _adapter_names(model: nn.Module, adapter: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the tensors of an adapter, by their names in its file and in the model."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - takes seconds

    config = getattr(model, "peft_config", {})[adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    of_prompt = config.is_prompt_learning and (kind not in _PROMPTS or config.inference_mode)
    if of_prompt or not hasattr(model, "get_base_model"):
        what = f"{kind} that is not trained" if config.inference_mode else f"{kind}" if of_prompt else "no PeftModel's"
        raise ValueError(
            f"adapter {adapter} is {what}, whose files Ullage does not know; use the methods of the model after "
            "session.close(), or train prompt, prefix or p-tuning, or an adapter of peft.get_peft_model"
        )
    placeholders = {name: torch.empty(2, 2, device="meta") for name in tensors}
    names = {id(tensor): name for name, tensor in tensors.items()} | {
        id(placeholder): name for name, placeholder in placeholders.items()
    }
    prompt = torch.empty(2, 2, device="meta")
    names[id(prompt)] = f"prompt_encoder.{adapter}.embedding.weight"
    with prompt_given(model, {adapter: prompt}), keys_alone():
        found = get_peft_model_state_dict(model, placeholders, adapter, save_embedding_layers=False)
    yield from ((name, names[id(found_as)]) for name, found_as in found.items())


@contextlib.contextmanager
def keys_alone() -> Iterator[None]:
    """Return a context in which only keys of ``state_dict()`` are needed, so that no session reads values."""
    before = KEYS_ALONE.set(True)
    try:
        yield
    finally:
        KEYS_ALONE.reset(before)


@contextlib.contextmanager
def prompt_given(model: nn.Module, prompts: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Make ``peft`` save these prompts, by adapter, instead of computing them."""
    undo = replace_attribute(model, _PROMPT_METHOD, prompts.__getitem__)
    try:
        yield
    finally:
        undo()


def prompts_of(model: nn.Module, adapters: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the current prompts by adapter, on the host, for those adapters that have a prompt encoder.

    It evaluates the encoders of a prepared model, so all ranks call it together.
    """
    encoders = getattr(model, "prompt_encoder", {})
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return {name: getattr(model, _PROMPT_METHOD)(name) for name in adapters if name in encoders}
    finally:
        model.train(was_training)


def _renamings_and_converters(mapping: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the transforms that only rename, and those that convert."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for transform in mapping:
        found[hasattr(transform, "operations")].append(transform)
    return found


def _ignored_patterns(model: Any) -> list[str]:
    """Return patterns of names that some models' files have, but modules do not need."""
    own = sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    own += [r"rotary_emb\.inv_freq"] * any(name.endswith("rotary_emb.inv_freq") for name in buffers)
    return own + [r"position_ids"] * any(name.endswith("position_ids") for name in buffers)
