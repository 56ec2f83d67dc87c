"""The manifest of a checkpoint: plain JSON that lists the files, their tensors, and checksums of every byte."""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError

from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.format.layout import ITEM_BYTES, Dtype, FileLayout
from executor.direct_io import BLOCK_BYTES
from hwprofiles.quantity import Frozen

MANIFEST_NAME: Final = "manifest.json"
VERSION: Final = 1
MAX_CHUNK_BYTES: Final = 64 << 20  # each reading thread has a buffer of one chunk
MAX_DIMENSIONS: Final = 32
MAX_VALUES: Final = 1 << 62


Count = Annotated[int, Field(ge=0, le=1 << 62)]


class FileRecord(Frozen):
    """A file of values.

    Attributes:
        path: path within the checkpoint's folder.
        num_bytes: length of the file.
        chunk_bytes: the file, with its header, is checked in chunks of this size. The last chunk may be shorter.
        checksums: xxh3 (64 bits) of each chunk, in hexadecimal digits.
    """

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")]
    num_bytes: Annotated[int, Field(ge=1)]
    chunk_bytes: Annotated[int, Field(ge=BLOCK_BYTES, le=MAX_CHUNK_BYTES, multiple_of=BLOCK_BYTES)]
    checksums: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...]

    @property
    def buffer_bytes(self) -> int:
        """Size of the file's largest chunk."""
        return min(self.chunk_bytes, self.num_bytes)


class Fragment(Frozen):
    """The place of a range of a tensor.

    Attributes:
        file: index of the file.
        start, stop: the range, in values of the flat tensor.
        offset: offset of its first byte in the file.
    """

    file: Count
    start: Count
    stop: Count
    offset: Count


class TensorRecord(Frozen):
    """A whole tensor.

    Attributes:
        dtype: safetensors' name of its type.
        shape: shape of the whole tensor.
        fragments: in order. Together they have each value once.
    """

    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMENSIONS)]
    fragments: tuple[Fragment, ...]

    @property
    def num_values(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)


def tensors_of(layouts: Sequence[FileLayout]) -> dict[str, TensorRecord]:
    """Return the tensors of files with these layouts. A file's number is its index in the list."""
    tensors: dict[str, TensorRecord] = {}
    for index, layout in enumerate(layouts):
        for entry, offset in zip(layout.entries, layout.starts, strict=True):
            known = tensors.get(entry.name)
            fragments = known.fragments if known else ()
            here = Fragment(file=index, start=entry.box.start, stop=entry.box.stop, offset=offset)
            tensors[entry.name] = TensorRecord(
                dtype=entry.dtype, shape=entry.shape, fragments=tuple(sorted((*fragments, here), key=_start))
            )
    return tensors


def _start(fragment: Fragment) -> int:
    return fragment.start


class Manifest(Frozen):
    """The content of a checkpoint; without a digest, the part of it that one rank has written.

    Attributes:
        version: version of this format.
        step: iterations of training that the checkpoint contains.
        files: all files of values.
        tensors: all tensors, by name.
        extra: other state of training, as plain JSON.
        digest: SHA-256 of all other fields; empty for a part.
    """

    version: Literal[1] = VERSION
    step: Count
    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]
    extra: dict[str, Any] = Field(default_factory=dict)
    digest: str = ""

    @classmethod
    def of(cls, step: int, parts: list[Self], extra: dict[str, Any]) -> Self:
        """Join the parts of all ranks.

        Raises:
            CheckpointError: a value is missing, or present twice.
        """
        files: list[FileRecord] = []
        tensors: dict[str, TensorRecord] = {}
        for part in parts:
            for name, record in part.tensors.items():
                if (known := tensors.get(name)) is None and not files:
                    tensors[name] = record  # the fast path for one rank: the drive idles at this time
                    continue
                if known is not None and (known.dtype, known.shape) != (record.dtype, record.shape):
                    raise CheckpointError(f"{name} is {known.dtype}{list(known.shape)} and {record.dtype} elsewhere")
                moved = (f.model_copy(update={"file": f.file + len(files)}) for f in record.fragments)
                both = sorted((*(known.fragments if known else ()), *moved), key=_start)
                tensors[name] = record.model_copy(update={"fragments": tuple(both)})
            files += part.files
        made = cls(step=step, files=tuple(files), tensors=tensors, extra=extra)
        made._check_whole()
        return made.model_copy(update={"digest": made._digest()})  # keeps the cached text

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Read an untrusted manifest.

        The result is safe to use. Values lie within their files, and no two tensors share bytes, so all tensors
        together need at most as much memory as the files have bytes.

        Raises:
            DamagedError: the manifest is damaged, or has another version.
        """
        try:
            made = cls.model_validate_json(text)
            digest = made._digest()
        except ValidationError as error:
            first = error.errors()[0]
            raise DamagedError(f"{MANIFEST_NAME}: {first['msg']} at {'.'.join(map(str, first['loc']))}") from None
        except ValueError as error:  # NaN or infinity
            raise DamagedError(f"{MANIFEST_NAME}: {error}") from None
        if made.digest != digest:
            raise DamagedError(f"{MANIFEST_NAME} does not match its own digest")
        made._check_whole()
        made._check_within()
        return made

    def to_json(self) -> bytes:
        """Return the bytes of the manifest's file."""
        return b'{"digest":"%s",%s' % (self.digest.encode(), self._rest[1:])

    def _digest(self) -> str:
        return hashlib.sha256(self._rest).hexdigest()

    @functools.cached_property
    def _rest(self) -> bytes:
        """All fields but the digest, as canonical JSON: with sorted keys. The digest would be the first one."""
        data = self.model_dump(mode="json", exclude={"digest"})
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def _check_whole(self) -> None:
        for name, record in self.tensors.items():
            end = 0
            for fragment in record.fragments:
                if not fragment.start == end <= fragment.stop or fragment.file >= len(self.files):
                    raise DamagedError(f"{name}: values {end} to {fragment.start} are missing, or present twice")
                end = fragment.stop
            if end != record.num_values:
                raise DamagedError(f"{name} has {record.num_values:,} values, but only {end:,} are present")

    def _check_within(self) -> None:
        if len({file.path for file in self.files}) < len(self.files):
            raise DamagedError(f"{MANIFEST_NAME} lists one file twice")
        held: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for name, record in self.tensors.items():
            if math.prod(max(extent, 1) for extent in record.shape) > MAX_VALUES:
                raise DamagedError(f"{MANIFEST_NAME}: {name} has shape {record.shape}, which is too large for a tensor")
            for fragment in record.fragments:
                num_bytes = (fragment.stop - fragment.start) * ITEM_BYTES[record.dtype]
                held[fragment.file].append((fragment.offset, fragment.offset + num_bytes))
        for file, ranges in zip(self.files, held, strict=True):
            ordered = [(0, 0), *sorted(ranges), (file.num_bytes, file.num_bytes)]
            if any(begin < end for (_, end), (begin, _) in itertools.pairwise(ordered)):
                raise DamagedError(f"{MANIFEST_NAME}: values overlap in {file.path}, or go beyond its end")
            if len(file.checksums) != -(-file.num_bytes // file.chunk_bytes):
                raise DamagedError(f"{MANIFEST_NAME}: {file.path} has another number of checksums than chunks")
