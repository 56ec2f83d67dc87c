"""Ctrl-C at every line of every call: training goes on as in memory, or the session says that it has failed."""

import copy
import dis
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest
import torch
from amount import ALL
from training import Task, batches, decide, prepare, session_options, uniform, units_of

from executor.checkpoint.levels import Level
from executor.devices.lanes import LaneError
from executor.training_state.saving import Checkpoints
from executor.weights.loading import load
from executor.weights.saving import save
from planner.decisions import Place
from planner.schedule.loop import OutOfOrderError

EXECUTOR = str(Path(sys.modules[LaneError.__module__].__file__).parents[1])
TASK = Task("llama", torch.bfloat16, iterations=4, schedule=False, max_norm=None)
FEW = 3
"""Lines of a call at which it is interrupted in ``make test``."""


class LineCounter:
    """Raises KeyboardInterrupt before the n-th line of the executor's code runs in this thread."""

    def __init__(self, stop: int = -1) -> None:
        self.num_lines, self._stop = 0, stop
        self.where = ""

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_anything: object) -> None:
        sys.settrace(None)

    def _called(self, frame, _event, _argument):
        return self._traced if frame.f_code.co_filename.startswith(EXECUTOR) else None

    def _traced(self, frame, event, _argument):
        if event == "line" and not leaves_a_context(frame):
            self.num_lines += 1
            if self.num_lines == self._stop:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._traced


def leaves_a_context(frame) -> bool:
    """Return whether a ``with`` is about to end, between its body and ``__exit__``, where no signal is handled.

    There, an exception would leave a lock held. CPython handles signals behind calls, which belong to the body.
    """
    code = frame.f_code.co_code[frame.f_lasti :]
    if dis.opname[code[0]] == "SWAP":  # a ``return`` in the body puts its value aside
        code = code[2:]
    return dis.opname[code[0]] == "LOAD_CONST" and code[:2] == code[2:4] == code[4:6]  # __exit__(None, None, None)


def streamed(_unit, count):
    return "gpu", "keep", [[Place.STREAM, Place.CPU, Place.GPU][i % 3] for i in range(count)]


PLANS = {
    "resident": uniform("gpu", "gpu"),
    "resident, updated by the host": uniform("gpu", "cpu"),
    "fetched": uniform("host", "cpu"),
    "streamed": streamed,
    "NVMe": uniform("nvme", "nvme"),
    "recomputed": uniform("host", "cpu", "recompute"),
    "updated during backward": uniform("host", "cpu"),
}


class Training:
    """A session after two steps, with what a right one gives."""

    def __init__(self, plan: str, folder: Path, files: Path | None = None) -> None:
        self.task, self.folder = TASK, folder
        start = "backward" if plan == "updated during backward" else "step"
        self.decisions = decide(TASK, PLANS[plan], clip=False, update_start=start)
        self.model, self.optimizer = prepare(TASK, self.decisions, checkpoint_buffer_bytes=1 << 20)
        self.session = self.optimizer.session
        self.checkpoints = Checkpoints(self.optimizer, Level(folder / "saved"))
        self.files, self.state = files, None
        self.loss = None

    def forward(self, number: int) -> None:
        tokens = batches(TASK)[number, 0]
        self.loss = self.model(input_ids=tokens, labels=tokens).loss

    def backward(self) -> None:
        self.loss.backward()

    def step(self, number: int) -> None:
        self.forward(number)
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> float:
        tokens = batches(TASK)[3, 0]
        try:
            with torch.no_grad():
                return self.model.eval()(input_ids=tokens, labels=tokens).loss.item()
        finally:
            self.model.train()

    def switch(self) -> None:
        other = decide(TASK, uniform("gpu", "cpu"), clip=False)
        self.checkpoints.close()
        options = session_options(checkpoint_buffer_bytes=1 << 20)
        self.optimizer.switch_plan(units_of(TASK, other), other, options, self.folder)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: values.clone() for name, values in self.optimizer.session.full_parameters().items()}

    def read_whole(self) -> None:
        list(self.session.stream_weights(torch.float32))

    def close(self) -> None:
        """Close everything, whatever has happened."""
        self.checkpoints.close()
        self.optimizer.session.close()
        self.session.close()


# What is done before, in words of the methods below; what is interrupted; what is done after it if it has not failed.
CALLS: dict[str, tuple[Callable[[Training], object], Callable[[Training], object]]] = {
    "full_parameters": (lambda _: None, lambda t: t.session.full_parameters()),
    "synchronize": (lambda _: None, lambda t: t.session.synchronize()),
    "stream_weights": (lambda _: None, Training.read_whole),
    "state_dict": (lambda _: None, lambda t: t.optimizer.state_dict()),
    "model.state_dict": (lambda _: None, lambda t: t.model.state_dict()),
    "evaluate": (lambda _: None, Training.evaluate),
    "ullage.save": (lambda _: None, lambda t: save(t.optimizer, t.folder / "out")),
    "save": (lambda _: None, lambda t: (t.checkpoints.save(2), t.checkpoints.finish())),
    "park": (lambda _: None, lambda t: t.session.park()),
    "park, weights stay": (lambda _: None, lambda t: t.session.park(keep_weights=True)),
    "unpark": (lambda t: t.session.park(), lambda t: t.session.unpark()),
    "forward": (lambda _: None, lambda t: t.forward(2)),
    "backward": (lambda t: t.forward(2), Training.backward),
    "step": (lambda t: (t.forward(2), t.backward()), lambda t: t.optimizer.step()),
    "load_state_dict": (lambda _: None, lambda t: t.optimizer.load_state_dict(copy.deepcopy(t.state))),
    "resume": (lambda _: None, lambda t: t.checkpoints.resume()),
    "load": (lambda _: None, lambda t: load(t.optimizer, t.files)),
    "switch_plan": (lambda _: None, Training.switch),
    "close": (lambda _: None, lambda t: t.session.close()),
    "close when parked": (lambda t: t.session.park(), lambda t: t.session.close()),
}
SAME = {"load", "load_state_dict", "resume"}
"""Calls that set what is there already, so that they can be made again without a trace."""


def started(plan: str, folder: Path, files: Path | None) -> Training:
    training = Training(plan, folder, files)
    training.step(0)
    training.step(1)
    training.state = copy.deepcopy(training.optimizer.state_dict())
    if files is None:
        training.checkpoints.save(2)
        training.checkpoints.finish()
    return training


def all_equal(found, expected) -> bool:
    return all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the right weights after two and three steps, and a folder of the former in float32."""
    folder = tmp_path_factory.mktemp("right")
    training = started("fetched", folder, None)
    two = training.weights()
    save(training.optimizer, folder / "weights", dtype="float32")
    training.step(2)
    three = training.weights()
    training.close()
    return folder / "weights", folder / "saved", two, three


def interrupted(plan: str, call: str, stop: int, folder: Path, files) -> LineCounter:
    """Interrupt a call, and check all that can be done afterwards. Return the counter, which says where that was."""
    weights_folder, _, two, three = files
    folder.mkdir()
    if call == "resume":
        (folder / "saved").symlink_to(files[1])
    training = started(plan, folder, weights_folder)
    before, do = CALLS[call]
    before(training)
    counter = LineCounter(stop)
    where = f"{plan}: {call}"
    try:
        with counter:
            do(training)
        completed = True
    except KeyboardInterrupt:
        completed = False
    where = f"{plan}, {call}: {counter.where}"
    try:
        if not call.startswith("close"):
            go_on(training, call, two, three, where, completed=completed)
    finally:
        training.checkpoints.close()
    training.optimizer.session.close()
    training.session.close()
    found = {name: values.detach() for name, values in training.model.named_parameters()}
    lost = {name for name, values in found.items() if values.isnan().all()}
    left = found.keys() - lost
    assert any(all(torch.equal(found[name], right[name]) for name in left) for right in (two, three)), (
        f"{where}: close() gives wrong weights"
    )
    assert call == "switch_plan" or not lost or not left, f"{where}: close() gives some of the weights"
    if call.startswith("close") and stop > 0:
        assert not lost, f"{where}: close() has lost the weights"
    return counter


def go_on(training: Training, call: str, two, three, where: str, *, completed: bool) -> None:
    """Train on, or check that every call says that the session has failed."""
    session = training.optimizer.session
    if completed and call in {"forward", "backward"}:
        if call == "forward":
            training.backward()
        training.optimizer.step()
    elif call == "step" and not completed and session is training.session and not session.runtime.machine.failed:
        if session.runtime.inside_iteration:  # nothing has begun
            training.optimizer.step()
    elif session.failed and call in {"forward", "backward"} and not session.runtime.machine.failed:
        training.optimizer.zero_grad()  # the next batch leaves the plan
        training.step(2)
    elif session.failed:
        assert not completed, where
        check_refusals(training, call, where)
        return
    elif call != "step":
        if session.runtime.parked:
            session.unpark()
        assert all_equal(training.weights(), two), f"{where}: mixed weights"
        training.step(2)
    assert all_equal(training.weights(), three), f"{where}: wrong weights after the next step"


def check_refusals(training: Training, call: str, where: str) -> None:
    """Check that every call says in one line that the session has failed."""
    later = {
        "step": training.optimizer.step,
        "weights": training.weights,
        "state_dict": training.optimizer.state_dict,
        "load_state_dict": lambda: training.optimizer.load_state_dict(training.state),
        "evaluate": training.evaluate,
        "park": training.session.park,
        "save": lambda: training.checkpoints.save(3),
        "stream_weights": training.read_whole,
    }
    if call == "switch_plan":  # the old session is closed
        later = {name: later[name] for name in ("step", "state_dict", "load_state_dict")}
    for name, other in later.items():
        with pytest.raises((LaneError, OutOfOrderError)) as refusal:
            other()
        assert "\n" not in str(refusal.value), f"{where}: {name}"
        if not training.session.runtime.inside_iteration and not training.optimizer.session.closed:
            assert "did not complete (KeyboardInterrupt)" in str(refusal.value), f"{where}: {name}: {refusal.value}"


def test_weights_that_are_read_again_after_ctrl_c_are_of_one_step(tmp_path):
    """Those on the device are copied there at the first read after a step, one after another."""
    training = Training("resident, updated by the host", tmp_path)
    training.step(0)
    actions, copied = training.session.runtime.actions, []
    upload = actions.upload

    def interrupted_upload(*piece):
        copied.append(piece)
        if len(copied) == FEW:
            raise KeyboardInterrupt
        upload(*piece)

    actions.upload = interrupted_upload
    with pytest.raises(KeyboardInterrupt):
        training.weights()
    found, state = training.weights(), training.optimizer.state_dict()["state"]
    names = [training.session.name_of(p) for group in training.optimizer.param_groups for p in group["params"]]
    for name, entry in zip(names, state.values(), strict=True):
        assert torch.equal(found[name], entry["master"].bfloat16()), name
    training.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("plan", PLANS)
def test_a_call_that_is_interrupted_anywhere_is_whole_or_said_to_have_failed(plan, files, tmp_path):
    for number, call in enumerate(CALLS):
        if not ALL and (number + list(PLANS).index(plan)) % len(PLANS):
            continue
        rng = random.Random(f"{plan} {call}")  # noqa: S311 - the same every time
        num_lines = interrupted(plan, call, -1, tmp_path / f"{call} whole", files).num_lines
        lines = range(1, num_lines + 1)
        few = FEW if not ALL else 60
        for stop in lines if num_lines <= few else sorted(rng.sample(lines, few)):
            interrupted(plan, call, stop, tmp_path / f"{call} {stop}", files)
