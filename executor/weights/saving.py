"""Saves weights under a plan, in the format that ``from_pretrained`` of ``transformers`` and ``peft`` loads."""

import collections
import contextlib
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import torch

from executor.checkpoint.files.system_calls import Files
from executor.module.naming import PROMPT, Naming, keys_alone, prompt_given, prompts_of
from executor.prepare import OffloadedOptimizer, check_prepared
from executor.session import Session
from executor.weights.folder import MAX_SHARD_BYTES, WeightsFolder
from hwprofiles.files import read_json

Dtype = Literal["bfloat16", "float16", "float32"]
SAVED_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
)


def save(
    optimizer: OffloadedOptimizer,
    folder: str | Path,
    *,
    dtype: Dtype | None = None,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Files | None = None,
) -> Path:
    """Save a prepared model between two iterations, in the format that ``from_pretrained`` loads.

    The folder has ``config.json``, and ``generation_config.json`` if the model generates. Weights have the names and
    the layout that ``transformers`` writes, and tied weights are written once. If a tokenizer is given, or weights were
    loaded from a folder with one, the folder has the tokenizer's files. If the model has adapters of ``peft``, only the
    adapters are saved. The folder appears complete or not at all. All ranks call this together; rank 0 writes, one
    tensor at a time.

    Args:
        optimizer: the optimizer that ``prepare`` returned.
        folder: a new folder, on rank 0's machine.
        dtype: data type of floating-point tensors (default: the plan's). ``"float32"`` saves the master copies.
        tokenizer: a tokenizer of ``transformers``, to save beside the weights.
        max_shard_bytes: limit of bytes of one file. A larger tensor has a file of its own.
        files: system calls that write.

    Returns:
        The folder.

    Raises:
        ValueError: the folder exists, or the data type is unknown; nothing is written.
        TypeError: an argument has another type.
        OSError: the folder cannot be written; no folder has its name.
        OutOfOrderError: in the middle of an iteration.
    """
    check_prepared(optimizer)
    _check_options(folder, dtype, tokenizer, max_shard_bytes)
    session, folder = optimizer.session, Path(folder)
    session.runtime.check_at_rest()
    session.runtime.check_has_weights()
    session.runtime.enter("save()")
    naming, weights_dtype = session.naming(), SAVED_DTYPES[dtype] if dtype else session.runtime.state.dtype
    is_first = not session.collectives.rank
    otherwise = OSError(f"rank 0 could not write {folder}; its own error says why")
    with contextlib.ExitStack() as stack:
        with session.collectives.together(otherwise):
            if is_first:
                new = stack.enter_context(WeightsFolder(folder, files))
                _write_small_files(new.path, optimizer, naming, weights_dtype, tokenizer)
        prompts = prompts_of(session.model, naming.adapters)
        values = (
            _adapter_values(session, naming, weights_dtype)
            if naming.adapters
            else session.stream_weights(weights_dtype)
        )
        with session.collectives.together(otherwise, (OSError,)):
            try:
                if is_first and naming.adapters:
                    with prompt_given(session.model, prompts), keys_alone(), new.naming():
                        session.model.save_pretrained(  # type: ignore[operator]
                            str(new.path), state_dict=dict(values), save_embedding_layers=False
                        )
                elif is_first:
                    new.write_tensors(naming.file_shapes(weights_dtype), values, max_shard_bytes)
                if is_first:
                    new.commit()
            except OSError:
                collections.deque(values, 0)  # all ranks must make the same collectives
                raise
            collections.deque(values, 0)
    return folder


def _check_options(folder: object, dtype: object, tokenizer: object, max_shard_bytes: object) -> None:
    if not isinstance(folder, str | Path) or not str(folder):
        raise TypeError(f"the folder is {folder!r}; give the path of a new one")
    if dtype is not None and dtype not in SAVED_DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but must be one of {', '.join(SAVED_DTYPES)}, or left out")
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes!r}, but must be a whole number of at least 1")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(f"the tokenizer is {type(tokenizer).__name__}; give one of transformers, or leave it out")


def _adapter_values(session: Session, naming: Naming, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all adapters, by their names in the model, on the host."""
    weights = session.reader(dtype)
    for names in naming.adapters.values():
        for theirs, name in names.items():
            if theirs != PROMPT:  # :func:`prompts_of` computes it
                yield name, weights(naming.tensors[name]).to("cpu", copy=True)


def _saved_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    found = read_json(path, ValueError, "copy it again") if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _write_small_files(
    path: Path, optimizer: OffloadedOptimizer, naming: Naming, dtype: torch.dtype, tokenizer: Any
) -> None:
    """Write configurations, and the tokenizer's files if one is given or was beside the loaded weights."""
    model: Any = naming.base
    if not naming.adapters and hasattr(model, "config"):
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], str(dtype).removeprefix("torch.")
        if optimizer.weights_folder is not None and hasattr(config, "use_cache"):  # it is off in training
            config.use_cache = _saved_config(optimizer.weights_folder).get("use_cache", True)
        config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    elif optimizer.weights_folder is not None:
        for name in _TOKENIZER_FILES:
            if (optimizer.weights_folder / name).is_file():
                shutil.copyfile(optimizer.weights_folder / name, path / name)
