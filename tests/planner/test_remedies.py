"""What would make a request fit: the smallest change of a kind, and nothing that was not planned."""

import dataclasses
import re

import pytest
from machines import machine

from planner.models import resolve_model
from planner.plan.planning import InfeasibleError, Request, make_plan
from planner.plan.remedies import what_would_fit


def request(micro_batch: int = 8, **sizes: object) -> Request:
    return Request(resolve_model("demo-llama"), machine(**sizes), seq_len=256, micro_batch=micro_batch)


def test_a_smaller_micro_batch_with_accumulation_is_the_smallest_change_that_fits():
    asked = request(gpu_bytes=8e7)
    with pytest.raises(InfeasibleError):
        make_plan(asked)
    found = {remedy.words: remedy for remedy in what_would_fit(asked)}
    words = next(words for words in found if words.startswith("--micro-batch"))
    size, repeats = (int(n) for n in re.findall(r"\d+", words))
    assert size * repeats == 8
    fits = dataclasses.replace(asked, micro_batch=size, num_micro_batches=repeats)
    assert make_plan(fits).prediction.iteration_s <= found[words].iteration_s
    with pytest.raises(InfeasibleError):
        make_plan(dataclasses.replace(asked, micro_batch=2 * size, num_micro_batches=repeats // 2))
    assert "devices with 16 GB" in found


def test_host_memory_is_asked_for_where_that_is_what_lacks():
    words = [remedy.words for remedy in what_would_fit(request(micro_batch=1, gpu_bytes=1.2e8, host_bytes=1e8))]
    assert "hosts with 16 GiB" in words
    assert not [word for word in words if word.startswith("--micro-batch")]


def test_where_there_is_one_memory_it_is_the_device_that_lacks_it():
    asked = request(micro_batch=1, gpu_bytes=1.2e8, host_bytes=1e8)
    asked = dataclasses.replace(asked, hardware=asked.hardware.model_copy(update={"one_memory": True}))
    with pytest.raises(InfeasibleError, match=r"a device with more memory$") as caught:
        make_plan(asked)
    assert "host" not in str(caught.value)
    words = [remedy.words for remedy in what_would_fit(asked)]
    assert "devices with 16 GB" in words
    assert not [word for word in words if word.startswith("hosts")]


def test_nothing_is_said_to_help_that_does_not():
    tiny = machine(gpu_bytes=1e6, host_bytes=1e6, inter_node=False)
    assert not list(what_would_fit(Request(resolve_model("opt-30b"), tiny, seq_len=256, micro_batch=1)))
