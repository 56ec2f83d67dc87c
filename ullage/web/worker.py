"""One job: what a process of its own does for one question. It sends lines of JSON, the last of which is its result.

The process is forked from one that has imported the planner (:mod:`ullage.web.preloaded`), answers one question and
ends: nothing that a question leaves behind can reach the next, and the kernel ends one that takes too much.
"""

import contextlib
import gc
import json
import math
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import ullage
from ullage.web.question import AXES, Question

_DAY_S: Final = 86400.0
_MOST_GPUS: Final = 64  # of machines that a network connects
_SLOW_S: Final = 12.0  # of a first plan; then recording the model again with tiles takes minutes
_NO_TILES: Final = "Recording this model takes long, so plans that compute it in tiles of tokens were not tried."
# Limits of tiles that no micro-batch reaches: whole layers and losses, which need one capture of a model less.
_WHOLE: Final[dict[str, Any]] = {"layer_tile_tokens": 10**8, "loss_tile_tokens": 10**8}
_FILE_BYTES: Final = 1 << 26
_EVERY_S: Final = 0.15  # between lines of progress
_WITH_HOST: Final = "host memory holds what does not fit in the GPU"
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


def run(kind: str, asked: Question, known: str | None, memory_bytes: int, cpu_s: int, out: Connection) -> None:
    """Answer a question, in a process that was begun for it.

    Args:
        kind: what is asked, a key of ``KINDS``.
        asked: the question.
        known: the plan.json of the question, if it is known.
        memory_bytes: address space that it may take beyond what it is forked with.
        cpu_s: processor time that it may take, in seconds.
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

    _limit(memory_bytes, cpu_s)
    gc.set_threshold(200_000)  # a capture makes many objects, and few of them are garbage
    with tempfile.TemporaryDirectory(prefix="ullage-web-") as place:
        folder = Path(place).resolve()
        os.chdir(folder)  # so that no name is that of a file here, but of those that the visitor sent
        try:
            KINDS[kind](asked, asked.options(folder), known, send)
        except ModuleNotFoundError as error:
            extras = "execute" if asked.how == "full" else "execute,finetune"
            send(error=f"this question needs {error.name}, which this server lacks; pip install 'ullage[web,{extras}]'")
        except (MemoryError, ImportError):  # a library that finds no room is not imported
            send(error="this question needs more memory than the page may take; ask for less, or install Ullage")
        except ValueError as error:
            send(error=_line(error, folder))
        except Exception as error:  # noqa: BLE001 - a bug of the planner ends this question only
            send(error=f"the planner failed ({type(error).__name__}: {_line(error, folder)}); please report it")
        os.chdir("/")


def _limit(memory_bytes: int, cpu_s: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    used_bytes = pages * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_AS, used_bytes + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
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
    begun_s = time.monotonic()
    try:
        is_captured = _is_captured(options)
        if first := _first_plan(options, send, is_captured=is_captured):
            send(first=_shown(asked, first) | texts)
        if first and is_captured and time.monotonic() - begun_s > _SLOW_S:
            options |= _WHOLE
            texts["note"] = _NO_TILES
        plan = ullage.plan(**options, progress=lambda words, *_: send(progress=words))
    except ullage.InfeasibleError as error:
        missing = {str(tier): count for tier, count in error.missing_bytes.items()}
        words = str(error.with_remedies({tier: _REMEDIES[str(tier)] for tier in error.missing_bytes}))
        if asked.storage == "gpu" and "host" in missing:
            words = (
                f"{asked.model} does not fit in GPU memory alone: the smallest plan found keeps "
                f"{missing['host'] / 1e9:,.1f} GB in host memory, which may not be used here"
            )
        refusal = {"fits": False, "error": words, "proven": error.proven, "missing_bytes": missing, **texts}
        send(first=refusal | {"remedies": []})
        send(progress="searching for changes with which it fits")
        remedies = []
        for remedy in _remedies(asked, options):
            remedies.append(remedy)
            send(first=refusal | {"remedies": remedies})
        send(result=refusal | {"remedies": remedies})
        return
    send(plan=plan.to_json())
    send(result=_shown(asked, plan) | texts)


def _is_captured(options: dict[str, Any]) -> bool:
    """Return whether the model of a question is captured: formulas have no adapters, and do not know all models."""
    if "lora" in options:
        return True
    try:
        ullage.resolve_model(options["model"])
    except ullage.ModelConfigError:
        return True
    return False


def _first_plan(options: dict[str, Any], send: Send, *, is_captured: bool) -> ullage.Plan | None:
    """Return the plan of a short search; ``None`` if only a whole one can say whether there is one."""
    short: dict[str, Any] = {**options, "max_simulations": 1, "engines": False}
    if not is_captured:
        send(progress="a first plan")
        return ullage.plan(**short)
    send(progress="recording one iteration of the model with PyTorch")
    with contextlib.suppress(ullage.InfeasibleError, ullage.ModelConfigError):  # it needs tiles, or can have none
        return ullage.plan(**short, **_WHOLE)
    return None


def _remedies(asked: Question, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes with which a question that does not fit would fit."""
    alone = asked.storage == "gpu"
    if alone:
        with contextlib.suppress(ValueError):
            more = {name: value for name, value in options.items() if name != "host_memory"}
            found = ullage.plan(**more, max_simulations=1, engines=False)
            yield {"change": "--storage never", "iteration_s": found.prediction.iteration_s, "effect": _WITH_HOST}
    for remedy in ullage.what_would_fit(**options):
        if not (alone and "host" in remedy.change):
            yield remedy._asdict()


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
    found["engines"]["about"]["placement of ullage"] = about["placement"]
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


class _Offer(NamedTuple):
    """Some GPUs of a machine: how late, for how much and how long a run is at least. Offers compare as visitors do."""

    late: bool
    cost: float
    run_s: float
    machine: str
    gpus: int


_NO_OFFER: Final = _Offer(late=True, cost=math.inf, run_s=math.inf, machine="", gpus=0)


def _offers(options: dict[str, Any], tokens: float, limit_s: float) -> list[_Offer]:
    """Return what could be the cheapest, the most promising first, with bounds that need no plan.

    Raises:
        ValueError: no machine can run the question.
    """
    found, reasons = list[_Offer](), list[ValueError]()
    for name, price in ullage.example_prices().machines.items():
        profile = ullage.load_profile(name)
        most = _MOST_GPUS if profile.inter_node else profile.devices_per_node
        for gpus in (2**power for power in range(most.bit_length())):
            try:
                run_s = tokens / ullage.bound_tokens_per_s(hardware=name, gpus=gpus, **options)
            except ValueError as error:
                reasons.append(error)
                break
            per_hour = gpus * price.per_device_hour - (-gpus // profile.devices_per_node) * price.per_node_hour
            found.append(_Offer(run_s > limit_s, per_hour * run_s / 3600, run_s, name, gpus))
    if not found:
        raise reasons[0]
    return sorted(found)


def _cheapest(asked: Question, options: dict[str, Any], _known: str | None, send: Send) -> None:
    """Send the machines for a run, from the first plan that each finds: each as soon as it is known, the best first.

    It ends when no other machine can be cheaper.
    """
    options = {name: value for name, value in options.items() if name not in {"hardware", "gpus"}}
    tokens, limit_s, prices = asked.tokens or 1e9, (asked.days or math.inf) * _DAY_S, ullage.example_prices()
    # The bound with a batch would be that of hundreds of ways to divide it; one without it, and a margin, stand for it.
    margin = 1.3 if "global_batch" in options else 1.0
    send(progress="asking how fast machines can be")
    left = _offers({name: value for name, value in options.items() if name != "global_batch"}, tokens, limit_s)
    best, rows, total = _NO_OFFER, list[dict[str, Any]](), len(left)
    while left and (left[0].late, left[0].cost / margin) < best[:2]:
        offer = left.pop(0)
        send(progress=f"planning {offer.gpus} x {offer.machine}", done=total - len(left), total=total)
        (point,) = ullage.study(
            hardware=offer.machine, gpus=offer.gpus, tokens=tokens, prices=prices, effort="fit", **options
        ).points
        if point.figures and point.cost and point.cost.run is not None and point.cost.run_s is not None:
            found = _Offer(point.cost.run_s > limit_s, point.cost.run, point.cost.run_s, offer.machine, offer.gpus)
            best = min(best, found)
            rows.append(found._asdict() | {"tokens_per_s": point.figures.tokens_per_s})
            rows.sort(key=lambda row: (row["late"], row["cost"]))
            send(first={"rows": rows, "currency": prices.currency})
    others = {"count": len(left), "cost": min((offer.cost for offer in left), default=None), "proven": margin == 1}
    send(result={"rows": rows, "currency": prices.currency, "others": others})


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
