"""Reads memory-mapped safetensors files, so that only the values that are being copied take host memory."""

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import SafetensorError, safe_open

from executor.direct_io import forget_pages
from executor.memory.stream import DTYPES
from hwprofiles.files import read_json

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
INDEX: Final = f"{WEIGHTS}.index.json"
CHUNK_BYTES: Final = 64 << 20
"""If a tensor is stored as in the model, at most this much of it, or one row, is in memory at once."""


def weights_folder(weights: str | Path) -> Path:
    """Return the folder of weights: the given folder, or the folder of a hub model in this machine's cache.

    Raises:
        ValueError: there is no such folder.
    """
    if not isinstance(weights, str | Path):
        raise TypeError(f"the weights are {weights!r}; give the path of a folder, or the name of a model on a hub")
    if not str(weights):
        raise ValueError("the folder of weights has no name; give its path, or the name of a model on a hub")
    folder = Path(weights).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{weights} is a file; give the folder that it is in")
    if str(weights) != Path(weights).as_posix() or len(folder.parts) > 2 or str(weights)[:1] in {".", "/", "~"}:
        raise ValueError(
            f"{weights}: there is no such folder; give a folder with {WEIGHTS}, or the name of a model on a hub"
        )
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - takes a second
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(str(weights), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"{weights} is not a folder, and this machine's cache of hub models has no model with that name; "
            f"download it first: hf download {weights}"
        ) from error


@final
class WeightFiles(contextlib.AbstractContextManager["WeightFiles"]):
    """The safetensors files of a folder.

    Args:
        folder: a folder with :data:`INDEX` and the files that it names, with one file, or with an adapter of ``peft``.

    Attributes:
        folder: the folder.
        shapes: all tensors by name, on the meta device.
        is_adapter: whether the tensors are those of an adapter.
        num_bytes: bytes of all tensors.

    Raises:
        ValueError: there are no such files, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}  # by tensor
        self._mapped: dict[str, Any] = {}  # by file
        self.is_adapter = not (folder / INDEX).exists() and (folder / ADAPTER).exists()
        listed = _listed(folder)
        for file in sorted(set(listed.values())) if listed else [_only_file(folder)]:
            self._open(file)
        if missing := sorted(name for name, file in listed.items() if self._files.get(name) != file):
            raise ValueError(
                f"{folder / INDEX} lists {missing[0]} in {listed[missing[0]]}, but it is not there; copy both files "
                "again"
            )
        self.num_bytes = sum(shape.nbytes for shape in self.shapes.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of its file. Values are read when they are used."""
        values: torch.Tensor = self._mapped[self._files[name]].get_tensor(name)
        return values

    def forget(self, name: str) -> None:
        """Free the memory of a tensor's values. If they are used again, they are read again."""
        values = self[name]
        before = values.data_ptr() % mmap.PAGESIZE
        if values.nbytes:
            forget_pages(values.data_ptr() - before, before + values.nbytes)

    def chunks(self, name: str, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a view of a tensor in flat parts of at most :data:`CHUNK_BYTES`, or one row, and forget each part."""
        rows = values.reshape(-1) if values.ndim < 2 else values
        num_rows = max(CHUNK_BYTES // max(rows[:1].nbytes, 1), 1)
        for first in range(0, len(rows), num_rows):
            yield rows[first : first + num_rows].reshape(-1)
            self.forget(name)

    def close(self) -> None:
        """Unmap the files. A file that still has views is unmapped with its last view."""
        self._mapped.clear()

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _open(self, file: str) -> None:
        path = self.folder / file
        try:
            # It checks the header, and the file's length against it.
            mapped: Any = safe_open(path, "pt")
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing; copy all files of the model again") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged, or is not a safetensors file ({error}); copy it again") from error
        self._mapped[file] = mapped
        for name in mapped.keys():  # noqa: SIM118 - it is no dictionary
            found = mapped.get_slice(name)
            if (dtype := DTYPES.get(kind := found.get_dtype())) is None:
                raise ValueError(
                    f"{path}: {name} has type {kind}, but weights are {', '.join(sorted(DTYPES))}; convert "
                    "the model to bf16 first, or if it is quantized load it with from_pretrained before prepare()"
                )
            if name in self.shapes:
                raise ValueError(f"{path}: {name} is in {self._files[name]} too; leave one of the files")
            self.shapes[name] = torch.empty(found.get_shape(), dtype=dtype, device="meta")
            self._files[name] = file


def _listed(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index lists it; empty without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    index = read_json(path, ValueError, "copy the files of the model again")
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{path} has no weight_map, which lists the file of each tensor; copy it again")
    if (strange := next((file for file in listed.values() if not file or Path(file).name != file), None)) is not None:
        raise ValueError(f"{path} names a file outside of its folder, {strange!r}; copy the model from a better source")
    return listed


def _only_file(folder: Path) -> str:
    for file in (WEIGHTS, ADAPTER):
        if (folder / file).exists():
            return file
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder} has weights only as pickles, which may run any code; if you trust them, convert them once: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
        )
    if any(folder.glob("**/manifest.json")):
        raise ValueError(
            f"{folder} has checkpoints of Ullage; export one: ullage checkpoint export {folder} --save NEW_FOLDER"
        )
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    several = f"several safetensors files but no {INDEX}" if found else f"no {WEIGHTS}"
    raise ValueError(f"{folder} has {several}; give a folder that save_pretrained() wrote")
