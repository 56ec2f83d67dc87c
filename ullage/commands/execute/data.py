"""The training data of ``ullage execute``, and the number of iterations."""

import shutil
from collections.abc import Callable
from typing import Any, Final, final

from executor.devices.lanes import NUM_RECORDED
from executor.weights.files import weights_folder
from executor.weights.folder import check_new
from hwprofiles.files import check_regular, make_folder
from planner.plan.document import Plan
from ullage.data import Data
from ullage.data.files import data_files
from ullage.output.formatting import si
from ullage.training.batches import check_knows_text, check_takes_tokens, vocabulary_for_data
from ullage.training.options import ExecuteOptions
from ullage.training.processes import Process
from ullage.training.text import Tokens, read_text, read_tokens
from ullage.training.trainer import Step, Trainer

_WIDTHS: Final = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of a weight
_TIMES_BYTES: Final = 16  # of a task of an iteration in run.json, at least
_ITERATIONS: Final = 30  # default without --iterations and --epochs


def check_data(options: ExecuteOptions) -> None:
    """Check that the options for data match and name files, before anything is measured, planned or read.

    Raises:
        ValueError: an option is missing or contradicts another, or the files are not data.
        OSError: a file does not exist.
    """
    sources = {"--text": options.text, "--tokens": options.tokens, "--data": options.data}
    given = [f"{option} {path}" for option, path in sources.items() if path is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both name training data; give one of them")
    if options.token_dtype is not None and options.tokens is None:
        raise ValueError(f"--token-dtype {options.token_dtype} is for a file of tokens; give --tokens PATH")
    of_data: dict[str, Any] = {
        "--tokenizer": options.tokenizer,
        "--pack": options.pack,
        "--epochs": options.epochs,
        "--drop-last": options.drop_last,
        "--eval-split": options.eval_split,
        "--eval-every": options.eval_every,
    }
    if options.data is None:
        for option, value in of_data.items():
            if value:
                raise ValueError(f"{option} is for text, chat or instructions in files; give --data PATH with it")
        return
    if options.tokenizer is None and options.weights is None:
        raise ValueError(
            f"--data {options.data} needs a tokenizer; give --tokenizer DIR, or --weights DIR with a tokenizer"
        )
    if options.eval_every and not options.eval_split:
        raise ValueError(f"--eval-every {options.eval_every} needs held-out data; give for example --eval-split 0.05")
    if options.epochs and options.num_iterations:
        raise ValueError(
            f"--epochs {options.epochs} and --iterations {options.num_iterations} both set the length of training; "
            "give one"
        )
    data_files(options.data)


def check_places(options: ExecuteOptions) -> None:
    """Check that files and weights exist, and that the folder for saving the model does not.

    Raises:
        ValueError: the weights do not exist, the folder of ``--save`` exists, or ``--save-dtype`` is without
            ``--save``.
        OSError: a file does not exist, or the folder of ``--save`` cannot be made.
    """
    for path in (options.text, options.tokens):
        if path is not None:
            check_regular(path)
    if options.weights is not None:
        weights_folder(options.weights)
    if options.save is not None:
        make_folder("--save", options.save.absolute().parent)
        check_new(options.save)
    elif options.save_dtype is not None:
        raise ValueError(f"--save-dtype {options.save_dtype} is the type for --save; give --save DIR")


def check_room(plan: Plan, options: ExecuteOptions, length: int) -> None:
    """Check that drives have room for what is written at the end of training, before it begins.

    Raises:
        ValueError: there is too little.
    """
    tasks = plan.schedule().num_tasks * min(length, NUM_RECORDED)
    needs = {("--output-dir", options.output_dir): tasks * _TIMES_BYTES}
    if options.save is not None:
        width = plan.decisions.precision.weight_bytes if options.save_dtype is None else _WIDTHS[options.save_dtype]
        trained = sum(unit.num_params for unit in plan.units())  # of LoRA only the adapters are saved
        needs["--save", options.save.absolute().parent] = trained * width
    for (option, folder), num_bytes in needs.items():
        if (free := shutil.disk_usage(folder).free) < num_bytes:
            raise ValueError(
                f"{option} needs {si(num_bytes, 'B')} at the end of training, but the drive of {folder} has "
                f"{si(free, 'B')} free; make room, or give a folder on another drive"
            )


def training_data(plan: Plan, options: ExecuteOptions, process: Process) -> Tokens | Data | None:
    """Return the training data for a plan's model; ``None``: the built-in text, or one random batch.

    Raises:
        PlanError: the model cannot be trained on such data.
        ValueError: the data are not valid.
        OSError: the data cannot be read.
    """
    if options.data is not None:
        size = vocabulary_for_data(plan)
        tokenizer = options.tokenizer or str(weights_folder(options.weights or ""))
        decided = plan.decisions
        data = Data(
            options.data,
            tokenizer,
            plan.seq_len,
            decided.micro_batch,
            decided.num_micro_batches,
            pack=options.pack,
            drop_last=options.drop_last,
            eval_split=options.eval_split,
            seed=options.seed,
        )
        data.share(process.data_rank, decided.data_parallel)
        if size is not None:
            data.check_vocabulary(size)
        return data
    given = bool(options.text or options.tokens or options.data_position)
    check_takes_tokens(plan, given=given)  # before reading the data
    if options.tokens is None:
        check_knows_text(plan)
        return None if options.text is None else read_text(options.text)
    return read_tokens(options.tokens, options.token_dtype)


def num_iterations(options: ExecuteOptions, data: Tokens | Data | None) -> int:
    """Return the number of iterations, from ``--iterations`` or ``--epochs``."""
    if options.epochs is None or not isinstance(data, Data):
        return options.num_iterations or _ITERATIONS
    data.position = options.data_position
    return data.num_steps(options.epochs)


@final
class Evaluations:
    """Evaluates the held-out data, if there are any, every so many iterations or at the end of each epoch.

    It first prints a line about the data.

    Args:
        data: the training data.
        every: iterations between evaluations; ``None``: evaluate at the end of each epoch.
        last: the last iteration, after which there is always an evaluation.
        report: function that prints a line.

    Attributes:
        losses: for each evaluation so far, the number of iterations before it, and the mean loss.
    """

    def __init__(self, data: Tokens | Data | None, every: int | None, last: int, report: Callable[[str], None]) -> None:
        self._data = data if isinstance(data, Data) and data.num_eval_sequences else None
        self._every = every
        self._last = last
        self._report = report
        self.losses: list[tuple[int, float]] = []
        if isinstance(data, Data):
            report(f"data: {data}")

    def after(self, step: Step, trainer: Trainer) -> float | None:
        """If an evaluation is due after this step, evaluate and return the loss. All ranks must call it together."""
        made = step.iteration + 1
        if self._data is None or not (
            made == self._last or (self._data.epoch_has_ended if self._every is None else made % self._every == 0)
        ):
            return None
        loss = trainer.evaluate()
        self.losses.append((made, loss))
        self._report(f"evaluation after iteration {made}: loss {loss:.3f}")
        return loss
