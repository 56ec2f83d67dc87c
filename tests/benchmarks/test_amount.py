"""``make test`` tries a part of everything, and ``make test-all`` all."""

from types import SimpleNamespace

import amount
import pytest


def items(test: str, cases: int, *markers: pytest.MarkDecorator) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(nodeid=f"{test}[{case}]", iter_markers=lambda name: (m.mark for m in markers if m.name == name))
        for case in range(cases)
    ]


@pytest.mark.parametrize("everything", [False, True])
def test_of_a_table_one_case_in_so_many_is_run(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amount, "ALL", everything)
    collected = [*items("a", 7, pytest.mark.part(3)), *items("b", 4), *items("c", 1, pytest.mark.part(5))]
    run, left = amount.divided(collected)
    names = ["a[0]", "a[3]", "a[6]", "b[0]", "b[1]", "b[2]", "b[3]", "c[0]"]
    assert [item.nodeid for item in run] == ([item.nodeid for item in collected] if everything else names)
    assert len(run) + len(left) == len(collected)


@pytest.mark.parametrize(("number", "few"), [(2, 2), (5, 3), (20, 3), (40, 4), (100, 10)])
def test_of_a_property_a_tenth_of_the_examples_is_tried(number: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amount, "ALL", False)
    assert amount.examples(number) == few
    monkeypatch.setattr(amount, "ALL", True)
    assert amount.examples(number) == number
