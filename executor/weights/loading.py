"""Loads weights from files to where a plan keeps them.

Each rank reads its own part of each tensor, straight from the mapped file to each place where the plan
keeps it: device, host or NVMe, in the plan's type and as a float32 master copy. Beside the plan's own memory, the host
has at most one chunk (:data:`executor.weights.files.CHUNK_BYTES`), or the result of one conversion of ``transformers``:
one expert of a bank, or one tensor that is stored in another layout.
"""

import dataclasses
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from executor.distributed.shards import ParameterShard
from executor.memory.frozen import FrozenParameter
from executor.memory.units import ParameterState
from executor.module.naming import Conversion, Naming
from executor.prepare import OffloadedOptimizer, check_prepared
from executor.weights.files import WeightFiles, weights_folder

_SHOWN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """The result of loading weights.

    Attributes:
        folder: the folder of the files.
        num_bytes: bytes of all files.
        kept: names of parameters that the files lack, so that they keep their values.
        unused: names of tensors that the model does not use.
        seconds: time that it took.
    """

    folder: Path
    num_bytes: int
    kept: tuple[str, ...]
    unused: tuple[str, ...]
    seconds: float


def load(optimizer: OffloadedOptimizer, weights: str | Path, *, strict: bool = True) -> Loaded:
    """Load weights from safetensors files to where the plan keeps them, between two iterations.

    The model may have been prepared on the meta device, or with other weights. Optimizer state stays the same. Host
    memory never holds the model in addition to the plan's own memory. All ranks call this
    together, and each reads the files. Rank 0 warns of tensors that the model does not use, and of optimizer state that
    belongs to other weights.

    Args:
        optimizer: the optimizer that ``prepare`` returned.
        weights: a folder with ``model.safetensors`` (or several files and an index), or with an adapter of ``peft``; or
            the name of a hub model that is on this machine.
        strict: raise an error if the files lack a parameter. Otherwise the parameter keeps its values, if it has any.

    Raises:
        ValueError: a tensor is missing or has another shape, or a file is damaged; nothing has changed.
        OutOfOrderError: in the middle of an iteration.
    """
    begin_s = time.perf_counter()
    check_prepared(optimizer)
    if not isinstance(strict, bool):
        raise TypeError(f"strict is {strict!r}, but must be True or False: whether a missing parameter is refused")
    session = optimizer.session
    session.runtime.check_idle()
    session.runtime.enter("load()")
    otherwise = ValueError(f"{weights}: another rank cannot load them; see the error of that rank")
    with session.collectives.together(otherwise):
        files = WeightFiles(weights_folder(weights))
        origins = _Origins(files, session.naming(), session.runtime.state.absent, strict=strict)
        _check_plain(session.runtime.state.shards().values(), origins)
    session.runtime.take_remaining()
    with files, session.runtime.changing("load()"):
        buffers = {**dict(session.model.named_buffers()), **session.runtime.state.as_buffers}
        for name in origins.there & buffers.keys():
            buffers[name].copy_(origins.buffer(name))
        for unit in session.runtime.state.units.values():
            session.runtime.state.set_weights(unit, origins.values_of)
            if unit.frozen is not None:
                unit.frozen.set_values(origins.values_of)
        session.runtime.state.absent -= origins.there
        optimizer.weights_folder = files.folder
    if origins.unused and session.collectives.rank == 0:
        more = f" and {len(origins.unused) - _SHOWN} more" if len(origins.unused) > _SHOWN else ""
        warnings.warn(
            f"{files.folder} has tensors that the model does not use: {', '.join(origins.unused[:_SHOWN])}{more}",
            RuntimeWarning,
            stacklevel=2,
        )
    steps = max((parameter.step for _, parameter in session.runtime.state.by_name.values()), default=0)
    if steps and session.collectives.rank == 0:
        warnings.warn(
            f"the weights are those of {files.folder} now, but the optimizer keeps its moments and step counts "
            f"({steps} steps), which belong to other weights: this is another trajectory; to go on with a run, resume "
            "from its checkpoint (ullage.Checkpoints), which has both",
            RuntimeWarning,
            stacklevel=2,
        )
    return Loaded(files.folder, files.num_bytes, origins.missing, origins.unused, time.perf_counter() - begin_s)


def check_weights(folder: Path, model: torch.nn.Module) -> None:
    """Check that files have all tensors that a model needs, in its shapes. The model may be on the meta device.

    Raises:
        ValueError: a tensor is missing or has another shape, or a file is damaged.
    """
    with WeightFiles(folder) as files:
        _Origins(files, Naming(model, {}), (), strict=True, remedy="")


class _Origins:
    """The sources of a model's tensors in files.

    Attributes:
        there: names of the parameters and buffers that get values.
        missing: names of the parameters and buffers that get none.
        unused: names of tensors in the files that the model does not use.

    Raises:
        ValueError: see :func:`load`.
    """

    def __init__(
        self,
        files: WeightFiles,
        naming: Naming,
        absent: Iterable[str],
        *,
        strict: bool,
        remedy: str = ", or keep the model's own values: load(strict=False)",
    ) -> None:
        self._files = files
        self._conversion: dict[str, tuple[Conversion, str]] = {}  # by name in the model; with the name in its result
        self._naming, self._tensors = naming, naming.tensors
        conversions, aliases, unused = _conversions_of(naming, files)
        self.unused = tuple(unused)
        for conversion in conversions:
            made = conversion.apply(files.shapes.__getitem__)
            for plain, tensor in made.items():
                for name in aliases.get(plain, ()):
                    self._check_kind(name, plain, tensor)
                    self._conversion[name] = conversion, plain
        self._check_ties()
        self._by_identity = {id(self._tensors[name]): name for name in reversed(self._conversion)}
        self.there = {name for name, tensor in self._tensors.items() if id(tensor) in self._by_identity}
        ignored = [re.compile(i) for i in getattr(naming.base, "_keys_to_ignore_on_load_missing", None) or ()]
        wanted = {name: plain for plain, names in aliases.items() for name in names}
        self.missing = tuple(
            name for name in wanted if name not in self.there and not any(i.search(wanted[name]) for i in ignored)
        )
        without = [name for name in self.missing if name in set(absent)]
        if without or (self.missing and strict):
            name = (without or self.missing)[0]
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            if without:
                remedy = ", or make the model on the CPU, so that it has initial values"
            raise ValueError(
                f"{files.folder} has no {wanted[name]}{more}, but the model has; give weights of this model{remedy}"
            )

    def values_of(self, parameter: ParameterState | FrozenParameter) -> Iterator[torch.Tensor]:
        """Yield the values of a rank's shard in flat parts, or nothing if the files have no values for it."""
        shard = parameter.shard
        if (name := self._by_identity.get(id(shard.whole))) is None:
            return
        conversion, plain = self._conversion[name]
        rows = conversion.by_rows() if shard.dim != 0 else None
        if conversion.converter is None:
            source = conversion.sources[0][1]
            yield from self._files.chunks(source, shard.part(self._files[source]))
        elif rows is not None:
            for row in rows[slice(*shard.own_rows) if shard.rows is not None else slice(None)]:
                yield shard.divided(row.apply(self._files.__getitem__)[plain]).reshape(-1)
                self._forget(row)
        else:
            yield shard.part(conversion.apply(self._files.__getitem__)[plain].reshape(shard.whole_shape)).reshape(-1)
            self._forget(conversion)

    def buffer(self, name: str) -> torch.Tensor:
        """Return the values of a buffer. The buffer may have several names."""
        conversion, plain = self._conversion[self._by_identity[id(self._tensors[name])]]
        return conversion.apply(self._files.__getitem__)[plain]

    def _forget(self, conversion: Conversion) -> None:
        for _, source in conversion.sources:
            self._files.forget(source)

    def _check_kind(self, name: str, plain: str, found: torch.Tensor) -> None:
        if self._tensors[name].is_floating_point() and not found.is_floating_point():
            kind = str(found.dtype).removeprefix("torch.")
            raise ValueError(
                f"{self._files.folder}: {plain} is {kind}, but a floating-point tensor in the model; give weights that "
                "are not quantized"
            )
        wanted = self._naming.shape_of(name)
        if found.shape != wanted:
            raise ValueError(
                f"{self._files.folder}: {plain} has shape {tuple(found.shape)}, but {wanted} in the model; make the "
                "model from the config.json beside the weights, and plan that"
            )

    def _check_ties(self) -> None:
        """Check that the files have equal values for all names of a tied tensor."""
        of_tensor: dict[int, list[str]] = {}
        for name in self._conversion:
            of_tensor.setdefault(id(self._tensors[name]), []).append(name)
        for first, *others in of_tensor.values():
            for other in others:
                if not self._are_equal(self._conversion[first], self._conversion[other]):
                    raise ValueError(
                        f"{self._files.folder} has different values for {self._naming.in_base.get(first, first)} and "
                        f"{self._naming.in_base.get(other, other)}, which are one tensor in the model; make the model "
                        "with tie_word_embeddings=False"
                    )

    def _are_equal(self, one: tuple[Conversion, str], other: tuple[Conversion, str]) -> bool:
        if one == other:
            return True
        if any(conversion.converter is not None for conversion, _ in (one, other)):
            return False
        names = [conversion.sources[0][1] for conversion, _ in (one, other)]
        parts = [self._files.chunks(name, self._files[name]) for name in names]
        return all(torch.equal(*pair) for pair in zip(*parts, strict=True))


def _conversions_of(naming: Naming, files: WeightFiles) -> tuple[list[Conversion], Mapping[str, list[str]], list[str]]:
    """Return the conversions, the model's names of their results, and the names of unused tensors."""
    if files.is_adapter:
        if not naming.adapters:
            raise ValueError(
                f"{files.folder} has an adapter, but the model has none; add one of the same kind with "
                "peft.get_peft_model(model, config) before prepare()"
            )
        adapter, names = next(iter(naming.adapters.items()))
        if naming.is_encoded(adapter):
            raise ValueError(
                f"{files.folder} has the prompt that an encoder made, but the model trains the encoder, which such "
                "files lack; resume from a checkpoint (ullage.Checkpoints), or evaluate with PeftModel.from_pretrained"
            )
        return (
            [Conversion(name, [("", name)]) for name in files.shapes if name in names],
            {theirs: [ours] for theirs, ours in names.items()},
            [name for name in files.shapes if name not in names],
        )
    aliases: dict[str, list[str]] = {}
    for name, plain in naming.in_base.items():
        aliases.setdefault(plain, []).append(name)
    conversions, unused = naming.of_files(files.shapes)
    return conversions, aliases, unused


def _check_plain(shards: Iterable[ParameterShard], origins: _Origins) -> None:
    """Check that the files have no values for quantized or complex parameters.

    Raises:
        ValueError: they have.
    """
    shards = tuple(shards)
    if name := next((s.name for s in shards if s.whole.is_complex() and s.name in origins.there), None):
        raise ValueError(f"{name} is complex, and cannot be loaded under a plan; load the weights before prepare()")
    if name := next((s.name for s in shards if s.stored.is_quantized and s.name in origins.there), None):
        raise ValueError(
            f"{name} is quantized, and cannot be loaded under a plan; load the weights before prepare(), with "
            "from_pretrained(..., quantization_config=...)"
        )
