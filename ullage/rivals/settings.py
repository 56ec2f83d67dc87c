"""An engine at a setting of the user's choice, or at its best."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from planner.choices.variants import Variant
from planner.decisions import Decisions
from planner.graph import Unit
from planner.optimizers import OPTIMIZERS
from planner.search import Candidate, best_of
from planner.setup import Setup
from ullage.rivals.best import best_with_own_kernels, scorer_of
from ullage.rivals.engines.catalogue import GRAPHS, POLICIES, STORAGE_POLICIES, can_run, policies_of
from ullage.rivals.engines.deepspeed import super_offload, twin_flow
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.engines.zenflow import zen_flow

OURS = "ullage"
ENGINES = POLICIES | STORAGE_POLICIES
_BY_COUNT: Final[Mapping[str, tuple[Callable[[Setup, tuple[int, ...]], Iterator[Decisions]], str]]] = {
    "zenflow": (zen_flow, "update interval"),
    "interleaved": (interleaved, "stride"),
}
"""Engines whose setting is a number, and what that is."""


def decided(engine: str, setting: str | None, variants: Iterable[Variant]) -> tuple[Decisions, tuple[Unit, ...] | None]:
    """Return the best decisions of an engine for some variants of a request, and its units if it has its own kernels.

    Args:
        engine: name of a policy, of :data:`ENGINES`.
        setting: the option that the policy leaves to its user: the fraction that the CPU updates (``twin-flow``,
            ``super-offload``), the stride (``interleaved``) or the steps between updates on the host (``zenflow``).
            ``None``: the best setting that the policy tries.
        variants: ways to divide the request.

    Raises:
        ValueError: the policy or its setting does not exist.
    """
    found = [_best(engine, setting, each) for each in variants]
    variant, best = min(found, key=lambda each: each[1].order)
    return best.decisions, variant.setup.units if engine in GRAPHS else None


def _best(engine: str, setting: str | None, variant: Variant) -> tuple[Variant, Candidate]:
    setup, scorer = variant.setup, scorer_of(variant)
    if engine not in ENGINES:
        names = ", ".join((OURS, *ENGINES)) if engine != OURS else "twin-flow, super-offload, interleaved, zenflow"
        raise ValueError(f"no engine {engine!r} takes {'that setting' if setting else 'part'}; choose one of {names}")
    state = OPTIMIZERS[setup.given.optimizer]
    if state.others and engine not in (known := policies_of(setup.given.optimizer)):
        raise ValueError(f"engine {engine} is not simulated with {state.words}; choose {' or '.join((OURS, *known))}")
    if not can_run(engine, setup, len(scorer.cost.layout.nodes())):
        raise ValueError(
            f"--engine {engine} cannot run this request: megatrain, roundpipe, slideformer and llmq need one node "
            "without other parallelism, zenflow, megatrain, streaming, slideformer and llmq need adamw, and "
            "slideformer needs --no-clip and one micro-batch; choose another engine"
        )
    if setting is None and (engine == "streaming" or engine in GRAPHS):
        if (found := best_with_own_kernels(variant, engine)) is None:
            raise ValueError(
                f"--engine {engine} has kernels of its own, which are known of models with RMS norms, SwiGLU and no "
                f"experts, not of {variant.request.model.name}; choose another engine"
            )
        return found
    policy = ENGINES[engine] if setting is None else _with_setting(engine, setting)
    return variant, best_of(map(scorer.score, policy(setup)))


def _with_setting(engine: str, setting: str) -> Callable[[Setup], Iterator[Decisions]]:
    if by_fraction := {"twin-flow": twin_flow, "super-offload": super_offload}.get(engine):
        try:
            fraction = float(setting)
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise ValueError(f"{engine} {setting}: the fraction that the CPU updates must be between 0 and 1")
        return lambda setup: by_fraction(setup, (fraction,))
    if engine not in _BY_COUNT:
        raise ValueError(f"{engine} {setting}: this engine has no setting; leave it out")
    policy, what = _BY_COUNT[engine]
    if not setting.isdecimal() or int(setting) < 1:
        raise ValueError(f"{engine} {setting}: the {what} must be a whole number of at least 1")
    return lambda setup: policy(setup, (int(setting),))
