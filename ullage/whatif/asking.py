"""``ullage.study``: studies from Python, kept in memory."""

from collections.abc import Mapping
from typing import Any, Literal

from ullage.output.progress import Report
from ullage.whatif.design import Space
from ullage.whatif.prices import Prices
from ullage.whatif.questions import answer
from ullage.whatif.running.runner import Evaluator, run_study
from ullage.whatif.running.store import Store
from ullage.whatif.study import Study, StudyRequest
from ullage.whatif.values import Question


def study(
    *,
    sweep: Mapping[str, str] | None = None,
    question: Question | None = None,
    tokens: float | None = None,
    deadline_s: float | None = None,
    prices: Prices | None = None,
    effort: Literal["plan", "certify", "fit"] = "plan",
    progress: Report = lambda *_: None,
    **options: Any,
) -> Study:
    """Plan with other machines, models and batches, and compare speed and cost, as ``ullage whatif`` does.

    Args:
        sweep: fields that vary, each with its values as on the command line, as in ``{"gpus": "1,2,4,8"}``.
        question: a question that chooses the points, such as ``"cheapest"``.
        tokens: tokens of a whole run.
        deadline_s: seconds within which the run must end.
        prices: prices of machines.
        effort: effort for each point. ``"fit"``: the first plan found that fits, a few percent slower than the best.
        progress: called with the present step in words, the finished points and the number of points.
        options: fields that are the same at every point, by their names in studies: ``model``, ``hardware``, ``gpus``.

    Raises:
        ValueError: an option names something unknown, or options contradict each other.
    """
    fixed = {name: str(value) for name, value in options.items() if value is not None}
    swept = {name: (values,) for name, values in (sweep or {}).items()}
    request = StudyRequest(set=fixed, sweep=swept, tokens=tokens, deadline_s=deadline_s, question=question)
    with Store(None) as store:
        evaluator = Evaluator(Space(request, effort), store, prices, progress=progress)
        return answer(evaluator) if question else run_study(evaluator)
