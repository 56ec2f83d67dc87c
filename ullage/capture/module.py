"""Capture the model of ``package.module:function`` with the shapes of its inputs."""

import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
import logging
import os
import sys
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from executor.callbacks import capturing
from executor.distributed.adapters import bind_adapted_parameters
from executor.memory.forward_state import SMALL_BYTES, as_they_were, kept_outside
from executor.module.guards import check_memory, refuse_replacements, trained_memory
from executor.module.own_checkpoints import passing_through, uncompiled
from executor.module.quantized import bind_quantized
from executor.module.tiled_logits import find_head
from executor.packed import stored_parameters
from planner.models.adapters import Lora
from planner.models.captured import NO_TILES, CapturedInput, CapturedModel, resized, tokens_of
from planner.models.loops import can_be_continued, continued
from planner.models.operators import Batch
from planner.models.quantization import Quantization
from planner.models.registry import list_models
from ullage.capture.adapters import make_adapted
from ullage.capture.architectures import architecture
from ullage.capture.assembly import assemble, repeated
from ullage.capture.attention import assumed_attention, attention_in_words, fused_attention
from ullage.capture.cuts import with_cuts
from ullage.capture.executable import Unseen, check_executable
from ullage.capture.fakes import VALUES, Fakes, users_line
from ullage.capture.inputs import NO_EXAMPLE, Example, tensor_of
from ullage.capture.partitioning import UnitVisits, as_one, joined_around, partition
from ullage.capture.quantized import check_formats, is_packed, pack
from ullage.capture.recording import OUTPUTS_LOSS, record
from ullage.capture.records import DTYPES, UNKNOWN, CaptureError, LongLoopError, Recording, first_line, remedy
from ullage.capture.repeats import Repeats, UnequalError
from ullage.capture.scans import fused_scans, scans_in_words
from ullage.capture.token_wise import TokenWise

# Loggers to silence: the first logs errors that are raised here anyway, the second logs the kind of loss.
_QUIET = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "transformers.modeling_utils")]
_LEAVES: Final = (str, bytes, int, float, type(None), type, Tensor, types.ModuleType, types.FunctionType)
_MANY_EVENTS = 8_000  # in the forward of the blocks that are recorded: from here on it is a loop over tokens


def capture(
    factory: str,
    inputs: Sequence[CapturedInput],
    dtype: Literal["bf16", "fp32"] = "bf16",
    *,
    as_on_gpu: bool = True,
    lora: Lora | None = None,
    quantization: Quantization | None = None,
) -> CapturedModel:
    """Capture the module that a function returns.

    Args:
        factory: ``package.module:function``, which takes no arguments and is also searched in the current directory; or
            the path of a ``config.json``, or the name of a packaged model.
        inputs: inputs of the module; the leading dimension is the micro-batch.
        dtype: type of weights and floating inputs.
        as_on_gpu: record the kernels of a GPU if they differ from those of a CPU.
        lora: adapters to add; only to architectures of ``transformers``.
        quantization: quantization of the projections beside adapters.

    Raises:
        CaptureError: the function does not exist, or its module cannot be captured.
        ValueError: a required library is not installed.
    """
    given = tuple(inputs)
    job = _Capture(None, factory, dtype, as_on_gpu, lora=lora, quantization=quantization)
    return job.of(given).freed(functools.partial(job.again, given))


def capture_module(
    make: Callable[[], nn.Module] | nn.Module,
    inputs: Sequence[CapturedInput | str],
    dtype: Literal["bf16", "fp32"] = "bf16",
    *,
    name: str = "",
    as_on_gpu: bool = True,
) -> CapturedModel:
    """Capture an existing module, or one that ``make`` returns; see :func:`capture`. The module does not change.

    Inputs may be texts as for ``--input-shape``.
    """
    given = tuple(CapturedInput.read(spec) if isinstance(spec, str) else spec for spec in inputs)
    return capture_called(make, given, dtype, NO_EXAMPLE, name=name, as_on_gpu=as_on_gpu)


def capture_called(
    make: Callable[[], nn.Module] | nn.Module,
    given: tuple[CapturedInput, ...],
    dtype: Literal["bf16", "fp32"],
    example: Example,
    *,
    name: str = "",
    as_on_gpu: bool,
) -> CapturedModel:
    """Capture as :func:`capture_module` does. The ``example`` says how the module is called with the inputs."""
    if not name:
        name = type(make).__name__ if isinstance(make, nn.Module) else f"{make.__module__}:{make.__qualname__}"
    job = _Capture(make, name, dtype, as_on_gpu, example=example)
    found = job.of(given)
    # A lambda, because neither the module nor the user's function goes to another process.
    return found if example.step is not None else found.freed(lambda size: job.again(given, size))


@dataclasses.dataclass(frozen=True)
class _Capture:
    """A module to capture with any inputs.

    Attributes:
        make: the module, or a function that makes it; ``None``: ``name`` says what makes it, see :func:`capture`.
        name: its name.
        dtype, as_on_gpu: see :func:`capture`.
        token_wise: paths of modules for tiles, kept from one size to the next.
        found: what has been captured, by inputs and tiles.
        example: how the module is called.
        lora, quantization: of a named model; see :func:`capture`.
    """

    make: Callable[[], nn.Module] | nn.Module | None
    name: str
    dtype: Literal["bf16", "fp32"]
    as_on_gpu: bool
    token_wise: list[str] = dataclasses.field(default_factory=list)
    found: dict[Any, CapturedModel] = dataclasses.field(default_factory=dict)
    example: Example = NO_EXAMPLE
    lora: Lora | None = None
    quantization: Quantization | None = None

    def again(self, given: tuple[CapturedInput, ...], size: Batch) -> CapturedModel:
        """Capture at another size, or with what crosses cuts.

        Inputs of a configuration are made for that size, other inputs are scaled.
        """
        if self.make is None and tokens_of(given) > 1 and not _is_function(self.name):
            masked = any(spec.name == "attention_mask" for spec in given)
            inputs = architecture(self.name).inputs(size.micro_batch, size.seq_len, masked=masked)
        else:
            inputs = resized(given, size.micro_batch, size.seq_len)
        captured = self.of(inputs, size)
        return self._cut(captured, inputs) if size.in_stages else captured

    def _cut(self, captured: CapturedModel, inputs: tuple[CapturedInput, ...]) -> CapturedModel:
        model, dtype = self._model(), DTYPES[self.dtype]
        known = self.example.known(inputs, dtype)
        with torch.device("meta"):
            unknown = [tensor_of(spec, dtype) for spec in inputs]
        args, kwargs = self.example.called_with(inputs, [known.get(i, each) for i, each in enumerate(unknown)])
        with capturing(), uncompiled(), passing_through(), _forgotten(), _default_positions():
            return with_cuts(captured, model.train(), args, kwargs)

    def _model(self) -> nn.Module:
        if isinstance(self.make, nn.Module):
            return self.make
        make, dtype = self.make, DTYPES[self.dtype]
        if make is None and self.lora is not None:
            make = functools.partial(make_adapted, architecture(self.name), self.lora, self.quantization, dtype)
        elif make is None:
            make = load_factory(self.name, dtype)
        return _made(make, self.name)

    def of(self, inputs: tuple[CapturedInput, ...], tiles: Batch = NO_TILES) -> CapturedModel:
        key = inputs, tiles.loss_tile_tokens, tiles.layer_tile_tokens
        if key not in self.found:
            self.found[key] = self._captured(inputs, tiles)
        return self.found[key]

    def _captured(self, inputs: tuple[CapturedInput, ...], tiles: Batch) -> CapturedModel:
        if self.example.tensors is None:
            _check_inputs(inputs)
        model = self._model()
        _check_parameters(model, self.name, self.dtype)
        check_formats(model, self.name)
        _check_statistics(model, self.name, DTYPES[self.dtype])
        # Nothing is known of how a model is executed that has no name.
        named = self.make is None and self.as_on_gpu
        attention = assumed_attention(model) if named else None
        with (
            fused_attention(model) if attention else contextlib.nullcontext(),
            fused_scans(model, assumed=named) as packages,
        ):
            try:
                captured = self._attempted(model, inputs, tiles)
            except CaptureError as refusal:
                if not refusal.assumed:
                    raise
                holding = dataclasses.replace(self, example=dataclasses.replace(self.example, all_hold=True))
                captured = holding._attempted(model, inputs, tiles)
        assumed, scans = list(captured.assumed or ()), tuple(sorted(packages)) if named else ()
        if attention is not None:
            assumed.append(attention_in_words(attention))
        if scans:
            assumed.append(scans_in_words(scans))
        update = {"attention": attention, "scans": scans or None, "assumed": tuple(assumed) or None}
        return captured.model_copy(update=update)

    def _attempted(self, model: nn.Module, inputs: tuple[CapturedInput, ...], tiles: Batch) -> CapturedModel:
        recorded = functools.partial(self._recorded, model, inputs, tiles)
        repeats = Repeats(model, _MANY_EVENTS if can_be_continued(inputs, tiles) else None)
        try:
            try:
                return recorded(repeats)
            except LongLoopError:
                return continued(self.of, inputs) or recorded(repeats := Repeats(model))
        except (UnequalError, CaptureError) as error:
            if isinstance(error, CaptureError) and not repeats.copies:
                raise
        return recorded(None)  # also if it has missed what was not recorded: a gradient that it asks for

    def _recorded(
        self, model: nn.Module, inputs: tuple[CapturedInput, ...], tiles: Batch, repeats: Repeats | None
    ) -> CapturedModel:
        """Record a model and return the captured model.

        Raises:
            LongLoopError: forward has more events than ``repeats`` allows.
            UnequalError: blocks that were skipped as copies must be recorded.
        """
        dtype = DTYPES[self.dtype]
        trained = trained_memory(model)
        example, made = self.example, list[Fakes]()
        # Before fake tensors exist, because conversions would be fake too.
        known, small = example.known(inputs, dtype), _small(model)
        with (
            torch.autograd.set_detect_anomaly(False),  # it reads values
            torch.device("cpu"),  # where all fakes are, whatever the user's default device
            FakeTensorMode(allow_non_fake_inputs=True),
            _faked(model, dtype, trained) as fake,
            contextlib.ExitStack() as changes,
            kept_outside(model, example.step),
            capturing(),
            uncompiled(),
            passing_through(),
            _forgotten(),
        ):
            for undo in (*refuse_replacements(model.modules(), _replaced), *bind_adapted_parameters(model)):
                changes.callback(undo)
            is_step = bool(example.step and example.tensors)  # a call of texts alone is no step of the user's
            with _as_capture_errors(self.name, model, made, is_step=is_step), _default_positions():
                given = [tensor_of(spec, dtype) for spec in inputs]
                values = [(given[number], value) for number, value in known.items()]
                values += [(fake[number], value) for number, value in small.items()]
                args, kwargs = example.called_with(inputs, given)
                function = functools.partial(example.step, model) if example.step else model.train()
                run = functools.partial(function, *args, **kwargs)

                def recorded(*tile: Any, **settings: Any) -> Recording:
                    empty = Recording(model.train(), example.step is not None, [None] * len(given))
                    made.append(Fakes(values, trained, all_hold=example.all_hold))
                    return record(empty, run, given, *tile, as_on_gpu=self.as_on_gpu, fakes=made[-1], **settings)

                tiled = []
                if tiles.layer_tile_tokens is not None:
                    if not self.token_wise:
                        seen = TokenWise(model)
                        first = recorded(repeats=repeats and Repeats(model), token_wise=seen)
                        self.token_wise.extend(_with_copies(seen.found(), first))
                        model.zero_grad()
                    tiled = [model.get_submodule(path) for path in self.token_wise]
                recording = recorded(tiles, tiled, repeats=repeats)
            if recording.copies and (recording.visits[-1].call > 1 or recording.second_order or recording.rewrites):
                raise UnequalError(recording.copies[0].path)
            known_as = (
                spec.model_copy(update={"num_values": num_values})
                for spec, num_values in zip(inputs, recording.num_values, strict=True)
            )
            inputs = recording.called_with or (CapturedInput(shape=()),) if example.step else tuple(known_as)
            about = {
                "factory": self.name,
                "inputs": inputs,
                "seq_len": tokens_of(inputs),
                "lora": self.lora,
                "quantization": self.quantization,
                "num_logits": _num_logits(model, recording),
                "loss_tile_tokens": tiles.loss_tile_tokens,
                "layer_tile_tokens": tiles.layer_tile_tokens,
                "assumed": _assumed(recording),
            }
            places = partition(recording)
            while True:
                if recording.unfollowed:
                    places = as_one(places)
                captured = repeated(assemble(recording, places, self.dtype, about), recording)
                if recording.unfollowed:
                    return captured
                with _as_capture_errors(self.name):
                    if (unseen := check_executable(recording, captured)) is None:
                        return captured
                    places = _around(recording, places, unseen)


def _around(recording: Recording, places: list[UnitVisits], unseen: Unseen) -> list[UnitVisits]:
    """Return the units where some are one, so that hooks see where a weight is read; of a step, note if none can.

    Raises:
        CaptureError: hooks cannot see it.
        UnequalError: they may where no block is a copy.
    """
    if (joined := joined_around(recording, places, unseen)) is not None:
        return joined
    if recording.copies:
        raise UnequalError(recording.copies[0].path)
    if not recording.is_step:
        raise CaptureError(unseen.refusal)
    recording.unfollowed = recording.second_order = True
    return places


def _assumed(recording: Recording) -> tuple[str, ...] | None:
    """Return what a recording does not know, in words for the user."""
    assumed = []
    if recording.unpriced:
        where = [f"{name}{f' in module {path}' if path else ''}" for name, path in recording.unpriced.items()]
        assumed.append(
            f"operators without a known cost are priced by the bytes that they move: {', '.join(where)}; iterations "
            "may be longer than predicted"
        )
    if recording.reader is not None:
        assumed.append(
            f"forward needs values that are computed{recording.reader}, and the plan assumes some: other values may "
            "take more memory, and what runs in another order runs on demand"
        )
    return tuple(assumed) or None


def _with_copies(paths: list[str], recording: Recording) -> list[str]:
    """Return paths of modules, and paths of the equal modules in blocks that were not recorded."""
    copies = [
        f"{copy.path}.{path.removeprefix(f'{copy.of}.')}"
        for copy in recording.copies
        for path in paths
        if path.startswith(f"{copy.of}.")
    ]
    return paths + copies


def _num_logits(model: nn.Module, recording: Recording) -> int | None:
    """Return the size of the vocabulary, if the model's own loss is computed from the output of its head."""
    head = find_head(model)
    if head is None or recording.loss != OUTPUTS_LOSS or all(visit.module is not head for visit in recording.visits):
        return None
    return head.out_features


def _made(make: Callable[[], nn.Module], name: str) -> nn.Module:
    """Return the module of a function, made without memory, with the settings of ``transformers``."""
    with _as_capture_errors(f"{name}()" if _is_function(name) else name), torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{name}() returned a {type(model).__name__}, not an nn.Module; return the model")
    return model


def _is_function(text: str) -> bool:
    """Return whether a text is ``package.module:function``, and not a file's path."""
    return ":" in text and not Path(text).exists()


def load_factory(text: str, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Return the function ``package.module:function``, or a function that makes the model of a ``config.json``.

    The latter makes weights of ``dtype``, and buffers of the types that they have beside such weights.

    Raises:
        CaptureError: the function does not exist.
    """
    if text.isidentifier() and text not in list_models() and not Path(text).exists():
        raise CaptureError(
            f"{text} was captured from a model in memory, so no function can make it; give ullage.prepare such a "
            "model with this plan, or plan --model package.module:function"
        )
    if not _is_function(text):
        return functools.partial(architecture(text).make, dtype)
    module_name, _, attribute = text.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - as `python -m` does
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise CaptureError(f"{module_name} cannot be imported: {error}; install what it needs") from error
        raise CaptureError(
            f"there is no module {error.name}; --model {text} is searched in the current directory, {here}"
        ) from error
    except Exception as error:
        raise CaptureError(f"{module_name} cannot be imported: {first_line(error)}") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise CaptureError(f"{module_name} has no function {attribute}; --model takes package.module:function")
    return found  # type: ignore[no-any-return]


def _check_inputs(inputs: Sequence[CapturedInput]) -> None:
    if any(a.name and not b.name for a, b in itertools.pairwise(inputs)):
        raise CaptureError("an input without a name follows an input with a name; change the order of --input-shape")
    if not inputs:
        raise CaptureError("a captured model needs the shapes of its inputs; give --input-shape, as in 4x2048:int64")


def _check_parameters(model: nn.Module, name: str, dtype: Literal["bf16", "fp32"]) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise CaptureError(f"{name}() has no parameters; return a model to train")
    try:
        check_memory(model)
    except ValueError as error:
        raise CaptureError(f"{name}: {error}") from error
    for path, parameter in parameters.items():
        if not (is_packed(parameter) or parameter.is_floating_point()):
            if parameter.dtype is torch.complex64 and parameter.requires_grad and dtype == "fp32":
                continue  # planned as real and imaginary parts
            of_real = (
                "make it one of real numbers, torch.view_as_real(parameter), and call torch.view_as_complex on that in "
                "forward: optimizers compute the same"
            )
            remedy = of_real if parameter.is_complex() else "make it a buffer"
            raise CaptureError(
                f"{name}: parameter {path} has type {parameter.dtype}, but must be floating-point, or complex64 and "
                f"trained beside fp32; {remedy}"
            )


def _check_statistics(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            found = module.running_mean.dtype
            if found is not dtype:
                raise CaptureError(
                    f"{name}: module {path} keeps statistics in {found}, which PyTorch does not combine with weights "
                    f"in {dtype}; give the model that type in {name}(), or choose another --precision"
                )


def _small(model: nn.Module) -> dict[int, Tensor]:
    """Return small parameters and buffers with values, by ``id``."""
    tensors = [p for p in model.parameters() if not is_packed(p)] + list(model.buffers())
    held = (t for t in tensors if not t.is_meta and t.layout is torch.strided)
    return {id(t): t.detach() for t in held if t.nbytes <= SMALL_BYTES}


@contextlib.contextmanager
def _faked(model: nn.Module, dtype: torch.dtype, trained: Callable[[Tensor], str]) -> Iterator[dict[int, Any]]:
    """Replace a model's tensors by fake ones, which support autograd like real ones; restore everything at the end.

    Yields the fake parameters and buffers, by ``id`` of the real ones.

    Fake parameters have the planned type, and tied parameters stay tied, also in lists that a module keeps of them.
    Other tensors keep their type; so do frozen parameters of a model that mixes types. Tensors in the memory of a
    trained parameter stay real, because reading them is refused. What forward does to attributes and containers (such
    as a cache) is undone.
    """
    with as_before(map(vars, model.modules())):
        made = _fakes_of(model, dtype)
        for module in model.modules():
            for own in (module._parameters, module._buffers):
                own.update({name: made.get(id(tensor), tensor) for name, tensor in own.items()})
            vars(module).update({name: _with_fakes(value, made, trained) for name, value in vars(module).items()})
        bind_quantized(model)
        yield made


@contextlib.contextmanager
def as_before(held: Iterable[Any]) -> Iterator[None]:
    """Undo what happens to containers, and to attributes and containers that objects hold."""
    before = ((each, dict(each) if isinstance(each, dict) else list(each)) for each in _containers(held))
    with as_they_were(list(before)):
        yield


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """Empty caches of functions (``functools.lru_cache``) that are filled meanwhile, with tensors without values."""

    def caches() -> list[tuple[Any, int]]:
        packages = [(each, str(each.__module__).partition(".")[0]) for each in _FUNCTIONS.found()]
        return [(each, each.cache_info().misses) for each, package in packages if package not in _KEEP_CACHES]

    before = caches()
    known = {id(each): misses for each, misses in before}
    try:
        yield
    finally:
        for each, misses in caches():
            if misses > known.get(id(each), 0):
                each.cache_clear()


class _CachedFunctions:
    """All functions of the process that have a cache. Each refers to its type.

    Finding them passes over all objects, which takes long. So they are looked for again only when there are others.
    """

    def __init__(self) -> None:
        self._found, self._num_other_references = weakref.WeakSet[Any](), 0

    def found(self) -> list[Any]:
        """Return all of them."""
        kind = functools._lru_cache_wrapper
        if sys.getrefcount(kind) - len(self._found) != self._num_other_references:
            self._found = weakref.WeakSet(each for each in gc.get_referrers(kind) if type(each) is kind)
            self._num_other_references = sys.getrefcount(kind) - len(self._found)
        return list(self._found)


_FUNCTIONS: Final = _CachedFunctions()
_KEEP_CACHES: Final = sys.stdlib_module_names | {"torch", "sympy", "executor", "planner", "ullage"}


def _containers(held: Iterable[Any]) -> Iterator[Any]:
    """Yield containers, and those of objects, that lead to one another."""
    left = [(each, True) for each in held]
    seen: set[int] = set()
    while left:
        each, may_enter = left.pop()
        if id(each) in seen or isinstance(each, _LEAVES):
            continue
        seen.add(id(each))
        if isinstance(each, dict | list | set | collections.deque | tuple):
            if not isinstance(each, tuple):
                yield each
            left += [(value, may_enter) for value in (dict.values(each) if isinstance(each, dict) else each)]
        elif may_enter and isinstance(inside := getattr(each, "__dict__", None), dict):
            left.append((inside, False))  # not what those objects hold, which may be the whole program


def _fakes_of(model: nn.Module, dtype: torch.dtype) -> dict[int, Any]:
    """Return fake parameters and buffers, by ``id`` of the real ones."""
    mixed = len({p.dtype for p in model.parameters() if not is_packed(p)}) > 1
    made: dict[int, Any] = {}
    for parameter, module in stored_parameters(model).values():
        if is_packed(parameter):
            made[id(parameter)] = pack(parameter, module, dtype)
            continue
        keeps = parameter.is_complex() or (mixed and not parameter.requires_grad)
        values = torch.empty(parameter.shape, dtype=parameter.dtype if keeps else dtype)
        made[id(parameter)] = _like(parameter, nn.Parameter(values, parameter.requires_grad))
    buffers = (b for b in model.buffers() if id(b) not in made and b.layout is torch.strided)  # sparse ones stay real
    return made | {id(b): torch.empty(b.shape, dtype=b.dtype) for b in buffers}


def _like(parameter: nn.Parameter, fake: nn.Parameter) -> nn.Parameter:
    """Give a fake parameter the attributes that people set on the real one, and the methods of a class of theirs."""
    if type(parameter) is not nn.Parameter:
        fake.__class__ = type(type(parameter).__name__, (type(fake), type(parameter)), {})
    for name, value in vars(parameter).items():
        vars(fake).setdefault(name, value)
    return fake


def _with_fakes(value: Any, made: Mapping[int, Any], trained: Callable[[Tensor], str]) -> Any:
    """Return an attribute of a module with fake tensors."""
    if isinstance(value, Tensor):
        if id(value) in made:
            return made[id(value)]
        stays = value.layout is not torch.strided or trained(value)
        return value if stays else torch.empty(value.shape, dtype=value.dtype)
    if type(value) in (list, tuple) and any(id(held) in made for held in value):
        return type(value)(made.get(id(held), held) for held in value)
    return value


def _replaced(name: str, kind: str) -> CaptureError:
    return CaptureError(
        f"forward sets {name} of a {kind}, but the modules and parameters of a planned model stay; set it before "
        "prepare()"
    )


def _default_positions() -> contextlib.AbstractContextManager[Any]:
    """Keep ``transformers`` from reading the values of positions. Without given positions, sequences are not packed.

    It tests whether a batch is packed from several sequences, and assumes with fake tensors that it is.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        return contextlib.nullcontext()
    return mock.patch.object(masks, "find_packed_sequence_indices", return_value=None)


@contextlib.contextmanager
def _as_capture_errors(
    name: str, model: nn.Module | None = None, fakes: Sequence[Fakes] = (), *, is_step: bool = False
) -> Iterator[None]:
    """Turn errors of the model into one line that says what cannot be captured, and where; ``fakes`` ran it."""
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as quiet:
            for log in _QUIET:
                quiet.enter_context(mock.patch.object(log, "disabled", new=True))
            # Copying a module reads addresses, which fake tensors do not have.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    except CaptureError as error:
        raise CaptureError(f"{name}{_at(error, model)}: {error}") from error
    except Exception as error:
        reader = fakes[-1].reader if fakes else None
        if reader is None and isinstance(error, VALUES):
            reader = users_line(traceback.extract_tb(error.__traceback__))
        if reader is not None and not isinstance(error, UNKNOWN):
            refusal = CaptureError(
                f"{name}{_at(error, model)}: it needs the values of a tensor{reader}, which a capture does not have, "
                "and it does not run with those that were assumed; compute the same for all values, as torch.where does"
            )
            refusal.assumed = True
            raise refusal from error
        way_out = remedy(error, has_model=model is not None, is_step=is_step)
        raise CaptureError(f"{name}{_at(error, model)}: {first_line(error)}; {way_out}") from error


def _at(error: Exception, model: nn.Module | None) -> str:
    """Return the innermost module whose forward an error has left, in words."""
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    running = [id(each.f_locals["self"]) for each in frames if each.f_code is nn.Module._call_impl.__code__]
    path = paths.get(running[-1], "") if running else ""
    return f", in module {path}" if path else ""
