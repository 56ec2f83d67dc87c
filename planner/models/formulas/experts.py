"""The experts of each rank, and the number of tokens that are routed to each expert.

Under expert parallelism every rank of a group has a block of equally many experts. Tokens of all
ranks are routed to them. At the next all-to-all, all ranks wait for the one with most tokens. So if the load is uneven,
the representative rank is, in every layer, the one with most tokens.
"""

from typing import TYPE_CHECKING

from planner.models.config import ModelConfig, ModelConfigError

if TYPE_CHECKING:
    from planner.models.operators import Batch

Row = tuple[float, ...]


def check(config: ModelConfig, batch: "Batch") -> None:
    """Check that ranks can share a model's experts, and that the batch's load fits them.

    Raises:
        ModelConfigError: naming the number, the rule and the remedy.
    """
    num, ranks = config.num_experts, batch.expert_parallel
    if not config.is_expert_model:
        if ranks > 1 or batch.expert_load:
            raise ModelConfigError(f"{config.name} has no experts; leave out expert parallelism and their load")
        return
    if num % ranks:
        raise ModelConfigError(
            f"num_experts of {config.name} is {num}, which {ranks} expert-parallel ranks cannot share equally; choose "
            "an expert_parallel that divides it"
        )
    if len(batch.expert_load) not in {0, 1, config.num_layers}:
        raise ModelConfigError(
            f"the load has {len(batch.expert_load)} rows, but {config.name} has {config.num_layers} layers; give one "
            "row for all layers or one for each"
        )
    for row in batch.expert_load:
        if len(row) != num or min(row) < 0 or not 0.999 < sum(row) < 1.001:
            raise ModelConfigError(
                f"a row of the load has {len(row)} shares that add up to {sum(row):.4g}, the least {min(row):.4g}, but "
                f"{config.name} has {num} experts, whose shares must not be negative and add up to 1; correct it"
            )


def load_of(batch: "Batch", layer: int) -> Row | None:
    """Return the shares of all visits that go to each expert of a layer; ``None`` if they are equal."""
    if not batch.expert_load:
        return None
    return batch.expert_load[layer if len(batch.expert_load) > 1 else 0]


def tokens(config: ModelConfig, batch: "Batch", layer: int) -> tuple[int, ...]:
    """Return how many tokens visit each expert of the rank with most tokens; see the module.

    With an even load, they add up to the group's visits divided by its ranks; with an uneven one, to more.
    """
    ranks, num = batch.expert_parallel, config.num_experts
    visits = batch.num_tokens * config.experts_per_token * ranks
    row = load_of(batch, layer)
    if row is None:
        every, longer = divmod(visits // ranks, num // ranks)
        return tuple(every + (i < longer) for i in range(num // ranks))
    counts, size = whole(row, visits), num // ranks
    return max((counts[first : first + size] for first in range(0, num, size)), key=sum)


def whole(shares: Row, total: int) -> tuple[int, ...]:
    """Return integers in proportion to ``shares`` that add up to ``total``; the largest remainders are rounded up."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(amount) for amount in exact]
    order = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def zipf(num_experts: int, exponent: float) -> Row:
    """Return a load that follows Zipf's law, ``rank ** -exponent``: the first expert is visited most."""
    weights = [(i + 1) ** -exponent for i in range(num_experts)]
    return tuple(weight / sum(weights) for weight in weights)


def groups(config: ModelConfig, batch: "Batch") -> list[tuple[int, int]]:
    """Return, for each unit, the first of the rank's experts in it and their number."""
    num = config.num_experts // batch.expert_parallel
    count = -(-num // min(batch.expert_units, num))
    return [(first, min(count, num - first)) for first in range(0, num, count)]
