"""Many iterations under any plan, of every optimizer, on 1, 2 and 4 ranks: the same bits as in memory.

Two hundred of them (twenty in ``make test``), with clipping, a learning rate that changes at every step, groups of
other decay and rate, dropout, and accumulation.
"""

import pytest
from amount import ALL, examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_programs import trained
from rank_references import reference as reference_of_ranks
from rank_references import trained_in_memory
from ranks import assert_same_bits
from training import OPTIMIZERS, Task, assert_same, decide, planned, prepare, reference, train

from planner.decisions import Place

LONG = {"family": "small", "iterations": 200 if ALL else 20, "max_norm": 0.5}
GRAINS = (1500, 100_000)
OF_THE_TABLE = ["adamw", "adam", "sgd", "adagrad", "lion"]


@pytest.mark.part(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=1, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_one_rank(optimizer, data):
    task, decisions = data.draw(plans(optimizers=(optimizer,), grains=GRAINS, **LONG))
    assert_same(planned(task, decisions), reference(task))


@pytest.mark.torture
@pytest.mark.parametrize("family", ["gpt2", "llama-tied", "qwen3", "mixtral"])
@settings(max_examples=examples(4), deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_models_of_several_layers(family, data):
    """Others have one layer and few words, as they are many."""
    optimizer = data.draw(st.sampled_from(list(OPTIMIZERS)))
    task, decisions = data.draw(
        plans(optimizers=(optimizer,), grains=(977, 3000, 100_000), **LONG | {"family": family})
    )
    assert_same(planned(task, decisions), reference(task))


@pytest.mark.part(3)
@pytest.mark.parametrize("optimizer", [*OF_THE_TABLE, "nadam"])
@settings(max_examples=1, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_two_ranks(processes, optimizer, data):
    task, decisions = data.draw(plans(optimizers=(optimizer,), sizes=[2], grains=GRAINS, **LONG))
    assert_same_bits(processes.call(2, trained, task, decisions), reference_of_ranks(task, 2, decisions))


@pytest.mark.part(5)
@pytest.mark.parametrize("all_long", [False, pytest.param(True, marks=pytest.mark.torture)], ids=["some", "all"])
@pytest.mark.parametrize("optimizer", OF_THE_TABLE)
@settings(max_examples=1, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_four_ranks(processes, optimizer, all_long, data):
    """How a ring orders a sum of four depends on where it cuts it, so here memory is that of four ranks too."""
    # Eight trainings take their time on two cores: one optimizer's are long, the others' short, with accumulation.
    given = LONG if all_long or optimizer == "adamw" else LONG | {"iterations": 20}
    count = 1 if optimizer == "adamw" and not all_long else 2
    grains = GRAINS[1:] if optimizer == "adamw" else GRAINS
    task, decisions = data.draw(
        plans(optimizers=(optimizer,), sizes=[4], grains=grains, num_micro_batches=count, **given)
    )
    expected = processes.call(4, trained_in_memory, task, decisions, timeout_s=300)
    found = processes.call(4, trained, task, decisions, timeout_s=300)
    for (seen, final), (losses, weights) in zip(found, expected, strict=True):
        assert seen == losses
        assert not [name for name, weight in weights.items() if final[name].tobytes() != weight.tobytes()]


@pytest.mark.part(2)
@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_share_that_keeps_the_first_rate_is_seen(place, optimizer):
    """In the bits that the tests above compare: wherever only the updates of one place are not told of the schedule."""
    task = Task("gpt2", optimizer=optimizer, iterations=3)
    model, ours = prepare(task, decide(task, mixed))
    with ours.session as session:
        actions, first, saved = session.runtime.actions.updates, {}, []
        runs = actions._parameter_runs

        def stale(unit, piece, iteration):
            for parameter, run in runs(unit, piece, iteration):
                if piece.place is place:
                    saved.append(first.setdefault((parameter.name, run.start), run.rule))
                    yield parameter, run._replace(rule=saved[-1])
                else:
                    yield parameter, run

        actions._parameter_runs = stale
        seen = train(task, model, ours), {n: w.clone() for n, w in session.full_parameters().items()}
    assert saved, "there is such a share"
    with pytest.raises(AssertionError):
        assert_same(seen, reference(task))
    assert_same(planned(task, decide(task, mixed)), reference(task))
