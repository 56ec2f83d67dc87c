"""What a prepared model, its optimizer and a closed session refuse, each with what to do instead."""

import copy
import io
import pickle

import pytest
import torch
from training import Task, batches, decide, prepare, uniform


TASK = Task("llama", torch.float32, iterations=3, schedule=False)
KEEP = uniform("host", "cpu")


@pytest.fixture
def started():
    model, optimizer = prepare(TASK, decide(TASK, KEEP))
    with optimizer.session:
        yield model, optimizer


def backward(model, number=0):
    tokens = batches(TASK)[number, 0]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("part", ["", "model.layers.0"])
@pytest.mark.parametrize(
    ("use", "names"),
    [
        (copy.deepcopy, r"copied.*load_state_dict\(model\.state_dict\(\)\)"),
        (pickle.dumps, r"pickled.*save model\.state_dict\(\)"),
        (lambda module: torch.save(module, io.BytesIO()), r"pickled.*save model\.state_dict\(\)"),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_prepared_model_is_neither_copied_nor_pickled(started, use, names, part):
    model, optimizer = started
    with pytest.raises(TypeError, match=names) as caught:
        use(model.get_submodule(part))
    assert "\n" not in str(caught.value)
    optimizer.session.close()
    copied = copy.deepcopy(model)
    assert not any(name.startswith("__") for module in copied.modules() for name in vars(module))
    torch.save(model.lm_head, io.BytesIO())
