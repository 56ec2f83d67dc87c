"""What ``--lora`` takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.models.adapters import Lora
from planner.models.config import ModelConfigError
from planner.subgroups import unit_layout

NAMES = st.lists(st.from_regex(r"[A-Za-z0-9_.-]+", fullmatch=True), min_size=1, max_size=4, unique=True)


@given(
    st.integers(1, 512),
    NAMES,
    st.none() | st.integers(1, 512).map(float) | st.sampled_from([0.5, 1.25]),
    st.sampled_from([0.0, 0.05, 0.1]),
    st.just([]) | NAMES,
)
def test_it_reads_what_it_writes(
    rank: int, targets: list[str], alpha: float | None, dropout: float, save: list[str]
) -> None:
    lora = Lora(rank=rank, targets=tuple(targets), alpha=alpha, dropout=dropout, save=tuple(save))
    assert Lora.read(str(lora)) == lora


def test_left_out_are_all_projections_and_a_scale_of_one() -> None:
    assert Lora.read("rank=16") == Lora(rank=16, targets=("all-linear",), alpha=None, dropout=0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not understood"),
        ("16", "'16' is not understood"),
        ("rank=16,size=2", "'size=2' is not understood"),
        ("rank=16,rank=8", "'rank=8' is not understood"),
        ("targets=q_proj", "rank: Field required"),
        ("rank=0", "rank: Input should be greater than 0"),
        ("rank=x", "rank: Input should be a valid integer"),
        ("rank=8,targets=", "targets: '' is no name of a module"),
        ("rank=8,targets=all-linear+q_proj", "targets: all-linear contains all others; give it alone"),
        ("rank=8,dropout=1", "dropout: Input should be less than 1"),
        ("rank=8,alpha=nan", "alpha: Input should be a finite number"),
    ],
)
def test_others_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ModelConfigError) as refused:
        Lora.read(text)
    assert reason in str(refused.value)
    assert str(refused.value).endswith("as in rank=16,targets=q_proj+v_proj")
    assert "\n" not in str(refused.value)


def test_a_unit_of_frozen_weights_alone_has_no_place_in_a_flat_range() -> None:
    for num_shards in (1, 2):
        assert unit_layout((), "adamw", num_shards, 100).starts == ()
