"""A model that was captured from an ``nn.Module``: its operators at each size that was needed, as plain data.

The capture itself needs PyTorch and lives in :mod:`ullage.capture`. What it yields is all that planning, simulating and
verifying need, so that a plan of a captured model stands alone as every other.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationError

from hwprofiles.quantity import Frozen
from planner.models.adapters import Lora
from planner.models.config import ModelConfig, ModelConfigError
from planner.models.formulas.conversion import with_fp8_products
from planner.models.formulas.ends import with_loss_of
from planner.models.formulas.kernel_sets import in_compiled_blocks, in_liger_modules
from planner.models.formulas.work import attention_scratch_bytes
from planner.models.kernels import Attention, Elementwise, Gemm, flop
from planner.models.operators import Batch, Operator
from planner.models.parameters import ParameterSpec
from planner.models.patterns import Pattern
from planner.models.quantization import Quantization

Count = Annotated[int, Field(ge=0)]
_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d{1,9}(?:x\d{1,9})*)(?::(\w+))?", re.ASCII)
CapturedKernels = tuple[Gemm | Attention | Elementwise, ...]


class CapturedInput(Frozen):
    """One tensor that the module is called with.

    Attributes:
        name: keyword; empty for a positional argument. Of a tensor inside another object, the path to it.
        shape: the leading dimension is the micro-batch, if that of all inputs is the same.
        dtype: ``float`` is the type of the weights.
        num_values: upper bound of integer values, because the model uses them as indices: rows of an embedding, or
            classes of a loss.
        begins: what each row begins with, as values and how often they follow one another: the model's shapes depend
            on them. The rest of a row is none of these values.
    """

    name: str = ""
    shape: tuple[Count, ...]
    dtype: Literal["float", "int64", "int32", "int16", "int8", "uint8", "bool"] = "float"
    num_values: Annotated[int, Field(gt=0)] | None = None
    begins: tuple[tuple[int, Annotated[int, Field(gt=0)]], ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the input that ``2x512:int64``, ``8x3x224x224`` or ``labels=2x512:int64`` means.

        Raises:
            ModelConfigError: ``text`` is not an input.
        """
        if found := _INPUT.fullmatch(text):
            name, shape, dtype = found.groups()
            with contextlib.suppress(ValidationError):
                sizes = tuple(map(int, shape.split("x")))
                if all(sizes):
                    return cls.model_validate({"name": name or "", "shape": sizes, "dtype": dtype or "float"})
        raise ModelConfigError(
            f"{text!r} is not an input; give [NAME=]SHAPE[:TYPE] with sizes from 1 on and one of float, int64, int32, "
            "int16, int8, uint8, bool, as in 2x512:int64 or labels=2x512:int64"
        )

    def __str__(self) -> str:
        """Return it as :meth:`read` reads it."""
        shape = f"{'x'.join(map(str, self.shape))}:{self.dtype}"
        return f"{self.name}={shape}" if self.name else shape


class CapturedOperator(Frozen):
    """An operator with names relative to its block; see :class:`planner.models.operators.Operator`.

    Attributes:
        name: path of the module whose forward ran it; ``#2`` marks what that module runs later.
        kind: class of the module.
        unit: path of the unit.
        shared_parameters: names of parameters of other units that it uses; those of its block begin with a point.
        saved_bytes: activations that autograd saves, each storage counted once.
        workspace_bytes: most bytes alive while it runs forward or backward, without gradients of parameters and
            activations saved up to its unit. The hidden state and its gradient count.
        copies_input: it is the first of its block, which keeps nothing of its input itself, but a copy in another type.
        in_tiles: its module computes a tile of tokens at a time.
        changed_inputs: see :class:`planner.models.operators.Operator`; ``None`` if there are none.
    """

    name: str
    kind: str
    unit: str
    parameters: tuple[ParameterSpec, ...] = ()
    shared_parameters: tuple[str, ...] = ()
    forward: CapturedKernels
    backward: CapturedKernels
    saved_bytes: Count
    output_bytes: Count
    workspace_bytes: Count
    num_skipped: Count = 0
    product_bytes: Count = 0
    copies_input: bool = False
    in_tiles: bool = False
    changed_inputs: tuple[Count, ...] | None = None


class CapturedBlock(Frozen):
    """Operators in forward order; blocks that are equal but for their path are stored once."""

    operators: tuple[CapturedOperator, ...]


class CapturedSegment(Frozen):
    """Where a block is in the model.

    Attributes:
        path: of the module that is recomputed as a whole. Operators outside repeated blocks have an empty path: each
            of their units is a segment of its own and is never recomputed.
        block: index of its block.
        call: the call of the model that runs it, from 2 on; ``None``: the first one.
        evaluates: whether that call is without gradients.
        given_bytes: what a stage of a pipeline is sent that begins with it, where the model ``is_cut`` and that is not
            just what recomputing it begins with.
        uncut: why no stage can begin with it; ``None``: one can, or nobody asked.
    """

    path: str
    block: Count
    call: int | None = None
    evaluates: Literal[True] | None = None
    given_bytes: Count | None = None
    uncut: str | None = None


NO_TILES: Final = Batch(1, 1)
"""A batch whose tokens are computed all at once."""

Again = Callable[[Batch], "CapturedModel"]
"""Captures the same module again, for another size (see :func:`_size`), or with what crosses cuts (``in_stages``)."""


class _Sizes:
    """Captures of a model at other sizes: no part of its value, so all compare equal.

    Attributes:
        again: captures it; ``None`` where that is not possible.
        resizes: whether it may do so at another micro-batch or number of tokens.
        found: what it has captured so far.
    """

    def __init__(self, again: Again | None = None, *, resizes: bool = True) -> None:
        self.again = again
        self.resizes = resizes
        self.found: dict[Batch, CapturedModel] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sizes)

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what cannot go to another process: a function of the user's, or a module."""
        again = self.again if isinstance(self.again, functools.partial) else None
        return {"again": again, "resizes": self.resizes, "found": self.found}


class CapturedModel(Frozen):
    """A captured ``nn.Module``.

    Attributes:
        factory: ``package.module:function`` that made it, or the name or ``config.json`` of an architecture.
        inputs: what it was called with.
        loss: the tensor from which backward began, in words.
        dtype: of weights and floating inputs.
        seq_len: tokens per sample: the second dimension of the first input where that is of integers, else 1 (a token
            is then a sample).
        blocks, segments: its operators.
        lora: adapters of ``peft`` that were put beside the factory's projections; everything else is frozen.
        quantization: of these projections.
        num_logits: size of its vocabulary, if it has a head whose loss can be computed in tiles.
        loss_tile_tokens: tokens of such a tile, with which it was captured; ``None``: logits were whole.
        layer_tile_tokens: tokens of a tile of norms and MLPs, likewise.
        assumed: what its capture did not know, as sentences for the user; ``None`` if it knew everything.
        attention: the ``attn_implementation`` of ``transformers`` that it assumes, and is executed with; ``None``: that
            which the model has.
        scans: packages whose kernels it assumes for scans over tokens, and is executed with.
        others: the same at other sizes, for plans that were compared at several; they have no others.
        calls: paths of the modules that a step of the user's loop calls, in order, of a step that calls several, or one
            that is not the model itself; ``None``: the model is called once. See [Note: Steps] in
            :mod:`ullage.capture.partitioning`.
        second_order: whether it makes gradients of gradients; see [Note: Second order] in :mod:`planner.setup`.
        compiled: whether a function that ``torch.compile`` has compiled calls its modules, or gets its parameters.
        is_cut: whether it knows what crosses a cut before each block, where it can be cut; ``None``: nobody asked.
        written: parameters that its forward writes to; frozen ones are in no operator. See [Note: Written weights] in
            :mod:`planner.setup`.
    """

    factory: str
    inputs: tuple[CapturedInput, ...] = Field(min_length=1)
    loss: str
    dtype: Literal["bf16", "fp32"]
    seq_len: Annotated[int, Field(gt=0)]
    blocks: tuple[CapturedBlock, ...]
    segments: tuple[CapturedSegment, ...] = Field(min_length=1)
    lora: Lora | None = None
    quantization: Quantization | None = None
    num_logits: int | None = None
    loss_tile_tokens: int | None = None
    layer_tile_tokens: int | None = None
    assumed: tuple[str, ...] | None = None
    attention: str | None = None
    scans: tuple[str, ...] | None = None
    others: tuple["CapturedModel", ...] = ()
    calls: tuple[str, ...] | None = None
    second_order: Literal[True] | None = None
    compiled: Literal[True] | None = None
    is_cut: Literal[True] | None = None
    written: tuple[str, ...] | None = None
    _sizes: _Sizes = PrivateAttr(default_factory=_Sizes)

    @property
    def name(self) -> str:
        """Its name in tables: of a ``config.json`` that of its folder."""
        base = self.factory.removesuffix("/config.json")
        if self.lora is None:
            return base
        return f"{base} [LoRA {self.lora}{f', {self.quantization}' if self.quantization else ''}]"

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens that it knows, if it is called with tokens alone: ``input_ids`` and ``labels``."""
        names, shapes = [spec.name for spec in self.inputs], {spec.shape for spec in self.inputs}
        is_text = sorted(names) == ["input_ids", "labels"] and len(shapes) == 1 and len(self.inputs[0].shape) == 2
        return next(spec.num_values for spec in self.inputs if spec.name == "input_ids") if is_text else None

    @functools.cached_property
    def num_trained(self) -> int:
        """Number of its parameters that are trained."""
        return sum(spec.num_params for o in self.operators() for spec in o.parameters if spec.is_trained)

    @property
    def micro_batch(self) -> int:
        """Samples of one forward: the leading dimension of its first input."""
        return micro_batch_of(self.inputs)

    @property
    def can_be_recaptured(self) -> bool:
        """Whether it can be captured again, at least with tiles."""
        return self._sizes.again is not None or any(other.layer_tile_tokens for other in (*self.others, self))

    @property
    def is_free(self) -> bool:
        """Whether it can be captured again at every size."""
        return self._sizes.again is not None and self._sizes.resizes and can_be_resized(self.inputs)

    def freed(self, again: Again | None) -> Self:
        """Return the same model, for ``again`` to capture at other sizes; ``None``: it has no others."""
        copy = self.model_copy()
        copy._sizes = _Sizes(again)
        return copy

    def of_one_size(self) -> Self:
        """Return the same model with its own micro-batch and tokens alone; the loss may still be in tiles."""
        copy = self.model_copy()
        copy._sizes = _Sizes(self._sizes.again, resizes=False)
        return copy

    def at(self, batch: Batch) -> "CapturedModel":
        """Return the model for another batch: its sequences, their tokens and the tokens of tiles.

        A size that is new is captured, at once and exactly: attention that slides, chunks of a scan, and shares of
        experts follow no formula of the sizes around it.

        Raises:
            ModelConfigError: it was not captured for that size, and cannot be.
        """
        size = _size(batch)
        wanted = dataclasses.replace(size, in_stages=batch.in_stages)
        known = {other.size: other for other in (*self.others, self)} | self._sizes.found
        has = known.get(wanted) or known.get(size)
        if has is not None and (has.is_cut or not batch.in_stages or self._sizes.again is None):
            return has
        resized = (size.micro_batch, size.seq_len) != (self.micro_batch, self.seq_len)
        allowed = self._sizes.resizes and can_be_resized(self.inputs) and (size.seq_len > 1) == (self.seq_len > 1)
        if self._sizes.again is None or (resized and not allowed):
            other = dataclasses.replace(size, dtype_bytes=self.batch.dtype_bytes)
            raise ModelConfigError(f"{self.name} was captured {_other_batch(self.batch, other)}")
        try:
            found = self._sizes.again(wanted)
        except ValueError as error:
            words = f"micro-batch {size.micro_batch}, {size.seq_len} tokens per sequence"
            raise ModelConfigError(f"{words}: {error}") from error
        self._sizes.found[wanted] = found
        return found

    def covering(self, chosen: Batch, others: Iterable[Batch]) -> "CapturedModel":
        """Return the model for one size, with its captures for others. It needs no PyTorch then.

        Args:
            chosen: the size.
            others: likewise.
        """
        fields = attrgetter("micro_batch", "seq_len", "loss_tile_tokens", "layer_tile_tokens")
        every = [chosen, *others]
        cut = {_size(batch) for batch in every if batch.in_stages}
        found = {
            size: self.at(dataclasses.replace(size, in_stages=size in cut)).freed(None) for size in map(_size, every)
        }
        own = found.pop(_size(chosen))
        alone = [found[size] for size in sorted(found, key=lambda size: [number or 0 for number in fields(size)])]
        return own.model_copy(update={"others": tuple(other.model_copy(update={"others": ()}) for other in alone)})

    @property
    def batch(self) -> Batch:
        """What it was captured for."""
        return Batch(
            self.micro_batch,
            self.seq_len,
            dtype_bytes=2 if self.dtype == "bf16" else 4,
            loss_tile_tokens=self.loss_tile_tokens,
            layer_tile_tokens=self.layer_tile_tokens,
        )

    @property
    def size(self) -> Batch:
        """What it was captured for, without the type of its weights."""
        return _size(self.batch)

    @functools.cached_property
    def num_params(self) -> int:
        """Number of its parameters, tied ones counted once."""
        return sum(operator.num_params for operator in self.operators())

    @functools.cached_property
    def forward_flop(self) -> int:
        """FLOP of one forward."""
        return sum(flop(operator.forward) for operator in self.operators())

    def operators(self) -> tuple[Operator, ...]:
        """Return the operators in forward order; equal blocks share their kernels.

        Raises:
            ModelConfigError: a segment has no block.
        """
        result: list[Operator] = []
        for segment in self.segments:
            if segment.block >= len(self.blocks):
                raise ModelConfigError(
                    f"segment {segment.path} has block {segment.block}, but there are {len(self.blocks)}; capture the "
                    "model again"
                )
            operators = self.blocks[segment.block].operators
            result += [
                _operator(segment, operator, stays=bool(self.second_order), written=self.written or ())
                for operator in operators
            ]
        return tuple(result)

    def graph(self, batch: Batch) -> tuple[Operator, ...]:
        """Return the operators at a batch; see :func:`planner.graph.build_graph`.

        Raises:
            ModelConfigError: it was not captured for the batch, and cannot be; or products in fp8 are wanted, of which
                it has none.
        """
        if (batch.dtype_bytes, batch.tensor_parallel) != (self.batch.dtype_bytes, 1):
            raise ModelConfigError(f"{self.name} was captured {_other_batch(self.batch, batch)}")
        operators = self.at(batch).operators()
        if batch.kernels != "transformers":
            self._check_kernels(batch)
        if batch.kernels == "compiled":
            operators = in_compiled_blocks(operators)
        elif batch.kernels == "liger":
            operators = tuple(in_liger_modules(operators, batch.dtype_bytes))
        if batch.kernels != "transformers" and self.num_logits is not None and batch.loss_tile_tokens is None:
            operators = with_loss_of(operators, batch.kernels, self.num_logits, batch.dtype_bytes)
        if batch.fp8_products:
            operators = with_fp8_products(self.name, operators, batch)
        return tuple(_with_scratch(operator, batch) for operator in operators) if batch.attention_scratch else operators

    def _check_kernels(self, batch: Batch) -> None:
        tiled = batch.layer_tile_tokens is not None or (batch.kernels == "liger" and batch.loss_tile_tokens is not None)
        whole = batch.kernels == "compiled-layers"
        if self.second_order or self.calls or tiled or whole:
            what = "computes in tiles" if tiled else "was captured" if whole else "has a step of its own"
            raise ModelConfigError(
                f"{self.name} {what}, which {batch.kernels} kernels cannot; leave out --kernels {batch.kernels}"
            )


def _size(batch: Batch) -> Batch:
    """Return a batch with what a capture depends on."""
    return Batch(
        batch.micro_batch,
        batch.seq_len,
        loss_tile_tokens=batch.loss_tile_tokens,
        layer_tile_tokens=batch.layer_tile_tokens,
    )


def _other_batch(captured: Batch, wanted: Batch) -> str:
    """Say in which fields a batch differs from the captured one, and what to do about each."""
    dtype = "fp32" if wanted.dtype_bytes == 4 else "bf16"
    fields = {
        "micro_batch": (
            "micro-batch",
            "ask for micro_batch={}, or capture it with inputs of the other leading dimension",
        ),
        "seq_len": ("tokens per sequence", "ask for seq_len={}, or capture it with inputs of the other length"),
        "dtype_bytes": ("bytes per value", f'capture it again with dtype="{dtype}", or ask for the precision it has'),
        "tensor_parallel": ("tensor-parallel ranks", "leave tensor_parallel out: it was captured whole"),
        "loss_tile_tokens": ("tokens of a tile of the loss", "ask for loss_tile_tokens={}"),
        "layer_tile_tokens": ("tokens of a tile of layers", "ask for layer_tile_tokens={}"),
    }
    parts = [
        (f"{words} {had}, not {wants}", remedy.format(had))
        for name, (words, remedy) in fields.items()
        if (had := getattr(captured, name)) != (wants := getattr(wanted, name))
    ]
    return f"for {' and '.join(words for words, _ in parts)}; {'; '.join(remedy for _, remedy in parts)}"


def micro_batch_of(inputs: Iterable[CapturedInput]) -> int:
    """Return the samples of one forward: the leading dimension of the first input; 1 if it has none."""
    first = next(iter(inputs))
    return first.shape[0] or 1 if first.shape else 1


def can_be_resized(inputs: Iterable[CapturedInput]) -> bool:
    """Return whether all inputs have the same leading dimension, the micro-batch. Others are taken as they are."""
    leading = {spec.shape[:1] for spec in inputs}
    return len(leading) == 1 and () not in leading


def tokens_of(inputs: Iterable[CapturedInput]) -> int:
    """Return the tokens per sample: the second dimension of the first input where that is of integers, else 1."""
    first = next(iter(inputs))
    return first.shape[1] if first.dtype.startswith("int") and len(first.shape) > 1 else 1


def resized(inputs: tuple[CapturedInput, ...], micro_batch: int, seq_len: int) -> tuple[CapturedInput, ...]:
    """Return inputs for another micro-batch and number of tokens.

    The leading dimension is the micro-batch. In inputs of whole numbers, each other dimension that is the number of
    tokens changes with it.

    Raises:
        ModelConfigError: the inputs have no common leading dimension, and another size is wanted.
    """
    had = tokens_of(inputs)
    if (micro_batch_of(inputs), had) == (micro_batch, seq_len):
        return inputs
    if not can_be_resized(inputs):
        raise ModelConfigError(
            f"the inputs {' '.join(map(str, inputs))} have no common leading dimension, so the batch is taken as it "
            "is; leave its size out (--micro-batch, --seq-len, --global-batch), or give inputs of the other size"
        )

    def shape(spec: CapturedInput) -> tuple[int, ...]:
        changes = had > 1 and spec.dtype != "float"
        return micro_batch, *(seq_len if changes and size == had else size for size in spec.shape[1:])

    return tuple(spec.model_copy(update={"shape": shape(spec), "num_values": None}) for spec in inputs)


def join(path: str, name: str) -> str:
    """Return the path of ``name`` below ``path``; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def _with_scratch(operator: Operator, batch: Batch) -> Operator:
    """Return an operator with the memory that kernels of its backward take for themselves, which no capture sees."""
    fused = (kernel for kernel in operator.backward if isinstance(kernel, Attention) and kernel.flash)
    found = [attention_scratch_bytes(kernel, grouped=kernel.shares_keys, e=batch.dtype_bytes) for kernel in fused]
    return dataclasses.replace(operator, workspace_bytes=operator.workspace_bytes + max(found, default=0))


def _operator(
    segment: CapturedSegment, captured: CapturedOperator, *, stays: bool, written: Collection[str]
) -> Operator:
    path, call = segment.path, f"@{segment.call}" if segment.call else ""
    unit = join(path, captured.unit)
    others = (join(path, name[1:]) if name.startswith(".") else name for name in captured.shared_parameters)
    placed = {
        "name": join(path, captured.name) + call,
        "unit": unit + call,
        "parameters": tuple(dataclasses.replace(spec, name=join(path, spec.name)) for spec in captured.parameters),
        "shared_parameters": tuple(others),
        "changed_inputs": captured.changed_inputs or (),
    }
    return Operator(
        **dict(captured) | placed,
        segment=(path or unit) + call,
        pattern=Pattern.REPLICATE,
        measured=True,
        call=segment.call or 1,
        evaluates=bool(segment.evaluates),
        stays=stays,
        writes=any(spec.is_trained and join(path, spec.name) in written for spec in captured.parameters),
        given_bytes=segment.given_bytes or 0,
        uncut=segment.uncut,
    )


def _tag(value: Any) -> str:
    return (
        "captured" if isinstance(value, CapturedModel) or (isinstance(value, dict) and "factory" in value) else "sizes"
    )


# A model is given by its sizes, from which operators follow, or by the operators themselves.
Model = ModelConfig | CapturedModel
ModelField = Annotated[
    Annotated[ModelConfig, Tag("sizes")] | Annotated[CapturedModel, Tag("captured")], Discriminator(_tag)
]


def counted(model: Model) -> str:
    """Return the plural of what a model's speed is counted in: tokens or samples."""
    return "samples" if isinstance(model, CapturedModel) and model.seq_len == 1 else "tokens"
