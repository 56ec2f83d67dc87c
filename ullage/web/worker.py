"""One job: what a process of its own does for one question. It sends lines of JSON, the last of which is its result.

The process is forked from one that has imported the planner (:mod:`ullage.web.preloaded`), answers one question and
ends: nothing that a question leaves behind can reach the next, and the kernel ends one that takes too much.
"""

import dataclasses
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import ullage
from ullage.web.question import AXES, Question

_DAY_S: Final = 86400.0
_FILE_BYTES: Final = 1 << 26
_EVERY_S: Final = 0.15  # between lines of progress
Send = Callable[..., None]

# By the tier that is too small, in the words of the page.
_REMEDIES: Final = {
    "gpu": "shorter sequences, fewer tokens per step, more GPUs, or GPUs with more memory may help",
    "host": "more GPUs on more nodes, or hosts with more memory may help",
    "nvme": "more nodes may help",
}
# Which parts of an explanation say why, by the name of the fact; and of which section.
_WHY: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "fits": (("memory",), ("units",)),
    "iteration": (("binds", "faster"), ("tricks",)),
    "8 of 10": ((), ("limits",)),
    "speed": (("binds", "worth"), ("tricks",)),
    "binds": (("binds",), ("limits",)),
    "best": (("best", "proof", "worth", "better"), ()),
    "peaks": (("memory",), ("units", "limits")),
    "engines": (("best",), ("tricks",)),
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one job may take.

    Attributes:
        memory_bytes: of address space beyond what it is forked with.
        cpu_s: processor time, in seconds.
    """

    memory_bytes: int = 4 << 30
    cpu_s: int = 240


def run(kind: str, asked: Question, known: str | None, limits: Limits, out: Connection) -> None:
    """Answer a question, in a process that was begun for it.

    Args:
        kind: what is asked, a key of ``KINDS``.
        asked: the question.
        known: the plan.json of the question, if it is known.
        limits: what this process may take.
        out: takes the lines.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the page, which ends this too
    told_s = 0.0

    def send(**line: Any) -> None:
        nonlocal told_s
        if "progress" in line:
            if time.monotonic() - told_s < _EVERY_S:
                return
            told_s = time.monotonic()
        out.send_bytes(json.dumps(line, allow_nan=False, default=_plain).encode())

    _limit(limits)
    with tempfile.TemporaryDirectory(prefix="ullage-web-") as place:
        folder = Path(place).resolve()
        (folder / "empty").mkdir()
        os.chdir(folder / "empty")  # so that no name is that of a file here
        try:
            KINDS[kind](asked, asked.options(folder), known, send)
        except ModuleNotFoundError as error:
            send(error=f"this question needs {error.name}, which this server lacks; pip install 'ullage[execute]'")
        except (MemoryError, ImportError):  # a library that finds no room is not imported
            send(error="this question needs more memory than the page may take; ask for less, or install Ullage")
        except ValueError as error:
            send(error=_line(error, folder))
        except Exception as error:  # noqa: BLE001 - a bug of the planner ends this question only
            send(error=f"the planner failed ({type(error).__name__}: {_line(error, folder)}); please report it")
        os.chdir("/")


def _limit(limits: Limits) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    used_bytes = pages * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_AS, used_bytes + limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _line(error: Exception, folder: Path) -> str:
    return " ".join(str(error).split()).replace(f"{folder}/profiles/", "").replace(f"{folder}/", "")[:1000]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, set | frozenset | tuple) else str(value)


def _answer(asked: Question, options: dict[str, Any], _known: str | None, send: Send) -> None:
    """Send the answer of a short search, and then that of the whole one, or what would fit."""
    texts = {"command": asked.command(), "python": asked.python()}
    try:
        send(progress="a first plan")
        first = ullage.plan(**options, max_simulations=1, engines=False)
        send(first=_shown(asked, first) | texts)
        plan = ullage.plan(**options, progress=lambda words, *_: send(progress=words))
    except ullage.InfeasibleError as error:
        missing = {str(tier): count for tier, count in error.missing_bytes.items()}
        words = error.with_remedies({tier: _REMEDIES[str(tier)] for tier in error.missing_bytes})
        refusal = {"fits": False, "error": str(words), "proven": error.proven, "missing_bytes": missing, **texts}
        send(first=refusal | {"remedies": []})
        send(progress="searching for changes with which it fits")
        remedies = []
        for remedy in ullage.what_would_fit(**options):
            remedies.append(remedy._asdict())
            send(first=refusal | {"remedies": remedies})
        send(result=refusal | {"remedies": remedies})
        return
    send(plan=plan.to_json())
    send(result=_shown(asked, plan) | texts)


def _shown(asked: Question, plan: ullage.Plan) -> dict[str, Any]:
    prices = ullage.example_prices()
    price = None if asked.profile else prices.machines.get(asked.machine)
    numbers = {
        "iteration_s": plan.prediction.iteration_s,
        "tokens_per_s": plan.prediction.tokens_per_s,
        "num_devices": plan.decisions.num_devices,
        "num_nodes": -(-plan.decisions.num_devices // plan.hardware.devices_per_node),
        "per_device_hour": price and price.per_device_hour,
        "per_node_hour": price and price.per_node_hour,
        "currency": prices.currency,
        "price_source": price and price.provenance.source,
        "bound_s": plan.certificate.bound_s,
    }
    return {"fits": True, "numbers": numbers, "part": ullage.page_data(ullage.summary(plan))}


def _planned(options: dict[str, Any], known: str | None, send: Send) -> ullage.Plan:
    if known is None:
        return ullage.plan(**options, progress=lambda words, *_: send(progress=words))
    path = Path("plan.json")
    path.write_text(known, encoding="utf-8")
    try:
        return ullage.load_plan(path)
    finally:
        path.unlink()


def _why(_asked: Question, options: dict[str, Any], known: str | None, send: Send) -> None:
    plan = _planned(options, known, send)
    part = ullage.page_data(ullage.explain(plan, lambda words, *_: send(progress=words)))
    sections = {section["key"]: section for section in part["sections"]}
    found: dict[str, dict[str, Any]] = {
        name: {
            "about": {row: part["about"][row] for row in rows if row in part["about"]},
            "sections": [sections[key] for key in keys],
        }
        for name, (rows, keys) in _WHY.items()
    }
    about = ullage.summary(plan).about
    found["8 of 10"]["about"] = {"rates": about["hardware"]}
    found["engines"]["about"]["placement"] = about["placement"]
    send(result=found)


def _details(_asked: Question, options: dict[str, Any], known: str | None, send: Send) -> None:
    plan = _planned(options, known, send)
    part = ullage.page_data(ullage.details(plan, lambda words, *_: send(progress=words)), "details")
    shown = {section["key"] for section in ullage.page_data(ullage.summary(plan))["sections"]}
    part["sections"] = [section for section in part["sections"] if section["key"] not in shown]
    ids = {each["id"] for section in part["sections"] for each in section["parts"]}
    part["figures"] = [figure for figure in part["figures"] if figure["id"] in ids]
    send(result=part)


def _report(_asked: Question, options: dict[str, Any], known: str | None, send: Send) -> None:
    plan = _planned(options, known, send)
    send(result=ullage.report_html([plan], lambda words, *_: send(progress=words)))


def _plan(_asked: Question, options: dict[str, Any], known: str | None, send: Send) -> None:
    send(result=_planned(options, known, send).to_json())


def _steps(send: Send) -> Callable[[str, int, int], None]:
    return lambda words, done, total: send(progress=words, done=done, total=total)


def _cheapest(asked: Question, options: dict[str, Any], _known: str | None, send: Send) -> None:
    """Send the cheapest machine, from the first plan that each of them finds."""
    options = {name: value for name, value in options.items() if name not in {"hardware", "gpus"}}
    found = ullage.study(
        question="cheapest",
        tokens=asked.tokens or 1e9,
        deadline_s=asked.days and asked.days * _DAY_S,
        prices=ullage.example_prices(),
        effort="fit",
        progress=_steps(send),
        **options,
    )
    assert found.answer is not None
    best = [found.points[at] for at in found.answer.points[:12]]
    rows = [
        {
            "machine": point.hardware,
            "gpus": point.settings["gpus"],
            "tokens_per_s": point.figures.tokens_per_s,
            "run": point.cost.run,
            "run_s": point.cost.run_s,
            "in_time": point.cost.in_time,
        }
        for point in best
        if point.figures and point.cost
    ]
    send(result={"words": found.answer.words, "rows": rows, "notes": found.notes, "currency": "USD"})


def _sweep(asked: Question, options: dict[str, Any], _known: str | None, send: Send) -> None:
    """Send the first plan found at every value of an axis, each as soon as it is known."""
    axis = asked.axis or "gpus"
    decided = {axis, "global_batch"} if axis in {"seq_len", "micro_batch"} else {axis}
    fixed = {name: value for name, value in options.items() if name not in decided}
    values, points = AXES[axis].split(","), list[dict[str, Any]]()
    for value in values:
        (point,) = ullage.study(sweep={axis: value}, effort="fit", **fixed).points
        points.append(
            {
                "value": value,
                "reason": point.result.reason,
                "iteration_s": point.figures and point.figures.iteration_s,
                "tokens_per_s": point.figures and point.figures.tokens_per_s,
            }
        )
        send(progress="planning", done=len(points), total=len(values))
        send(first={"axis": axis, "points": points})
    send(result={"axis": axis, "points": points})


KINDS: Final[dict[str, Callable[[Question, dict[str, Any], str | None, Send], None]]] = {
    "answer": _answer,
    "why": _why,
    "details": _details,
    "report": _report,
    "plan": _plan,
    "cheapest": _cheapest,
    "sweep": _sweep,
}
"""What can be asked, and what answers it."""
