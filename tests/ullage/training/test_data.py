"""``ullage.Data``: every token once, masks, order, and a loss that is that of one big batch."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from amount import examples
from data_objects import MARKED, lines, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from record_files import TOKENIZER, data_of, records

import ullage
from ullage.data.batches import IGNORED, DataBatch
from ullage.data.order import Order, shares
from ullage.data.packing import packed

QUESTION = "Below is an instruction that describes a task"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def learned(batches: Iterable[DataBatch]) -> list[tuple[int, ...]]:
    """Return the targets of each document, in sorted order: those that count in the loss."""
    found = []
    for batch in batches:
        if batch.weight:
            starts = batch.inputs.get("position_ids", torch.arange(batch.inputs["labels"].shape[1])[None]) == 0
            for labels, begins in zip(batch.inputs["labels"], starts.expand_as(batch.inputs["labels"]), strict=True):
                for part in np.split(labels.numpy(), np.flatnonzero(begins.numpy())):
                    targets = part[part != IGNORED]
                    found += [tuple(targets.tolist())] * (len(targets) > 0)
    return sorted(found)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_packing_has_every_piece_once_and_wastes_little(lengths: list[int]) -> None:
    found = list(packed(lengths, 16))
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
    sums = [sum(lengths[piece] for piece in sequence) for sequence in found]
    assert max(sums) <= 16
    assert sum(sorted(sums)[:2]) > 16 or len(sums) == 1, "no two have room for each other"


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))
def test_ranks_share_every_micro_batch(num_rows: int, micro_batch: int, num_ranks: int) -> None:
    rows = np.arange(num_rows) + 100
    of_ranks = [list(shares(rows, micro_batch, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1, "all call the model equally often"
    counted = [row for joined in zip(*of_ranks, strict=True) for share in joined if share.counts for row in share.rows]
    assert counted == rows.tolist()
    assert all(1 <= len(share.rows) <= micro_batch for of_rank in of_ranks for share in of_rank)
    for joined in zip(*of_ranks, strict=True):
        sizes = [len(share.rows) * share.counts for share in joined]
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 30), st.integers(1, 8), st.booleans(), st.integers(0, 3), st.integers(1, 3))
def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own(
    num: int, per_step: int, drop_last: bool, seed: int, epochs: int
) -> None:
    if drop_last and num < per_step:
        with pytest.raises(ValueError, match=r"a step takes .* leave --drop-last out"):
            Order(num, per_step, seed, drop_last=drop_last)
        return
    order, position, found = Order(num, per_step, seed, drop_last=drop_last), 0, []
    assert order.num_steps(epochs) == epochs * order.steps_per_epoch
    while left := order.num_steps(epochs, position):
        found.append(order.step(position))
        position += len(found[-1])
        assert order.num_steps(epochs, position) == left - 1
    assert position == epochs * order.per_epoch
    again = Order(num, per_step, seed, drop_last=drop_last)
    assert [again.step(per_step).tolist(), again.step(0).tolist()] == [step.tolist() for step in found[1::-1]] or (
        order.steps_per_epoch == 1
    ), "it depends on the position alone"
    if num > 12 and epochs > 1:
        assert (
            np.concatenate(found[: order.steps_per_epoch]).tolist()
            != np.concatenate(found[order.steps_per_epoch : 2 * order.steps_per_epoch]).tolist()
        )
    for epoch in range(epochs):
        steps = found[epoch * order.steps_per_epoch :][: order.steps_per_epoch]
        seen = np.concatenate(steps)
        assert len(set(seen.tolist())) == len(seen) == (num - num % per_step if drop_last else num)
        assert {len(step) for step in steps[:-1]} <= {per_step}


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=4, max_size=14),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    pack=st.booleans(),
    split=st.sampled_from([0.0, 0.3]),
    cut=st.integers(0, 20),
)
def test_every_target_comes_once_an_epoch_and_any_position_gives_the_rest(
    folder: Path, lengths: list[int], shape: tuple[int, int, int], pack: bool, split: float, cut: int
) -> None:
    micro_batch, num_micro_batches, num_ranks = shape
    rows = records(lengths)
    every = [(*TOKENIZER(row["completion"]).input_ids, 1) for row in rows]
    ranks = [
        data_of(folder, rows, 32, micro_batch, num_micro_batches, pack=pack, eval_split=split) for _ in range(num_ranks)
    ]
    for rank, data in enumerate(ranks):
        data.share(rank, num_ranks)
    steps = [list(joined) for joined in zip(*(data.steps(2) for data in ranks), strict=True)]
    for step in steps:
        assert sum(batch.weight for of_rank in step for batch in of_rank) == pytest.approx(num_ranks)
        targets = sum(batch.num_targets for of_rank in step for batch in of_rank)
        for batch in itertools.chain.from_iterable(step):
            assert batch.weight == pytest.approx(num_ranks * batch.num_targets / targets)
            if batch.weight:
                assert int((batch.inputs["labels"][:, 1:] != IGNORED).sum()) == batch.num_targets
    half = len(steps) // 2
    found = [learned(itertools.chain(*itertools.chain(*part))) for part in (steps[:half], steps[half:])]
    held_out = learned(ranks[0]._batches(ranks[0]._eval_sequences, np.arange(ranks[0].num_eval_sequences)))
    if num_ranks > 1:
        ranks[0].share(0, 1)
        held_out = learned(ranks[0]._batches(ranks[0]._eval_sequences, np.arange(ranks[0].num_eval_sequences)))
    assert found[0] == found[1]
    assert sorted(found[0] + held_out) == sorted(every)
    assert len(held_out) == round(split * len(rows))
    # Another process goes on in the middle.
    whole = ranks[0]
    whole.position = 0
    rest = list(whole.steps(2))[cut:]
    whole.position = 0
    for _ in itertools.islice(whole.steps(2), cut):
        pass
    other = data_of(folder, rows, 32, micro_batch, num_micro_batches, pack=pack, eval_split=split)
    other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    again = list(other.steps(2))
    assert [learned(step) for step in again] == [learned(step) for step in rest]


def shown(data: ullage.Data) -> list[tuple[str, str]]:
    """Return each sequence, and of what is learned of it."""
    found = []
    for batch in itertools.chain(*data.steps()):
        for ids, labels in zip(batch.inputs["input_ids"], batch.inputs["labels"], strict=True):
            assert all(label in {IGNORED, token} for token, label in zip(ids.tolist(), labels.tolist(), strict=True))
            found.append((TOKENIZER.decode(ids), TOKENIZER.decode(labels[labels != IGNORED])))
    return sorted(found)


CHAT = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "four"},
]
ASSISTANT = "<user>1+1<end><assistant>two<end><user>2+2<end><assistant>four<end>"


@pytest.mark.parametrize(
    ("record", "whole", "targets"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "2+2=4<eos>", "4<eos>"),
        ({"messages": CHAT}, ASSISTANT, "two<end>four<end>"),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, ASSISTANT, "four<end>"),
        ({"messages": [*CHAT[:3], CHAT[3] | {"weight": 0}]}, ASSISTANT, "two<end>"),
        ({"messages": CHAT[1:]}, ASSISTANT.removeprefix("<user>1+1<end>"), "two<end>four<end>"),
        ({"text": "to be"}, "to be<eos>", "o be<eos>"),
    ],
    ids=["instruction", "chat", "chat of a prompt", "chat with a weight", "chat that begins with an answer", "text"],
)
@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_what_is_learned_of_a_record(
    tmp_path: Path, record: dict[str, Any], whole: str, targets: str, pack: bool
) -> None:
    padding = "<pad>" * (80 - len(TOKENIZER(whole).input_ids)) if pack else ""
    assert shown(data_of(tmp_path, [record], 80, pack=pack)) == [(whole + padding, targets)]


def test_answers_are_found_by_the_marks_of_a_template(tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, {"prompt": CHAT[:3], "completion": CHAT[3:]}]
    rows.append({"messages": [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:]]})
    assert shown(data_of(tmp_path, rows, 80, tokenizer=make_tokenizer(MARKED))) == [
        (ASSISTANT, "four<end>"),
        (ASSISTANT, "four<end>"),
        (ASSISTANT, "two<end>four<end>"),
    ]


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_a_list_or_a_table_has_the_same_as_lines(tmp_path: Path, suffix: str) -> None:
    rows = [{"messages": CHAT}, {"prompt": "2+2=", "completion": "4"}, {"text": "to be"}]
    if suffix == ".json":
        (tmp_path / "data.json").write_text(json.dumps(rows, indent=1))
    else:
        columns = dict.fromkeys(key for row in rows for key in row)
        datasets.Dataset.from_list([columns | row for row in rows]).to_parquet(tmp_path / "data.parquet")
    found = ullage.Data(tmp_path / f"data{suffix}", TOKENIZER, 80)
    expected = data_of(tmp_path, rows, 80)
    assert shown(found) == shown(expected)
    assert found.state_dict() == expected.state_dict()


def test_alpaca_has_its_prompt(tmp_path: Path) -> None:
    rows = [
        {"instruction": "add", "input": "1, 2", "output": "3"},
        {"instruction": "greet", "input": "", "output": "hi"},
    ]
    (first, learned_of_first), (second, learned_of_second) = shown(data_of(tmp_path, rows, 400, 1))
    assert (learned_of_first, learned_of_second) == ("3<eos>", "hi<eos>")
    assert first.startswith(f"{QUESTION}, paired with an input")
    assert first.endswith("### Instruction:~add~### Input:~1, 2~### Response:~3<eos>")
    assert second.startswith(f"{QUESTION}. Write")
    assert second.endswith("### Instruction:~greet~### Response:~hi<eos>")


def test_a_long_text_is_continued_and_a_long_answer_is_cut_off_and_counted(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(25))
    (tmp_path / "a.txt").write_text(text)
    lines(tmp_path / "b.jsonl", [{"prompt": "ab", "completion": "c" * 20}, {"prompt": "p" * 12, "completion": "c"}])
    (tmp_path / "notes.pdf").touch()  # another kind of file
    data = ullage.Data(tmp_path, TOKENIZER, 10)
    assert [whole for whole, _ in shown(data)] == ["abcccccccc", "abcdefghij", "klmnopqrst", "uvwxy<eos>"]
    counts = data.counts
    assert (counts.documents, counts.cut_off, counts.without_targets) == (3, 2, 1)
    assert "2 documents longer than 10 tokens were cut off, 1 without target tokens were left out" in str(data)


BAD = {
    "no file": (None, {}, r"there is no such file or folder; give a file .*no.jsonl"),
    "no JSON": (
        '{"text": "a b"}\n\n{"text": oh}\n',
        {},
        r"data.jsonl, line 3 is not JSON \(Expecting value.*write one",
    ),
    "half of a character": (
        '{"text": "a"}\n{"text": "\\ud83d cut"}\n',
        {},
        r"data.jsonl, line 2 has \\ud83d, half of a character; write both halves",
    ),
    "nested too deeply": (
        '{"text": ' + "[" * 50000 + "]" * 50000 + "}\n",
        {},
        r"data.jsonl, line 1 is not JSON \(maximum recursion depth.*write one",
    ),
    "half of an archive": ("\x1f\udc8b\x08\x00garbage", {}, r"data.jsonl is compressed, and not whole .*; unpack it"),
    "a weight between": (
        '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}\n',
        {},
        r"line 1: weight of message 1 of messages is 0.5; write 1, or 0",
    ),
    "no record": ('"text"\n', {}, r"line 1 is str, not a record"),
    "other fields": ('{"question": "a"}\n', {}, r"line 1: the record has question; name its fields text, or messages"),
    "another kind": ('{"prompt": "a", "completion": 3}\n', {}, r"line 1: completion is a number; write it as a text"),
    "null": ('{"text": null}\n', {}, r"line 1: text is null; write it as a text in quotation marks"),
    "a prompt of another kind": (
        '{"prompt": [], "completion": "a"}\n',
        {},
        r"only one of prompt and completion is a list of messages; write both",
    ),
    "an empty chat": ('{"messages": []}\n', {}, r"line 1: messages is an empty list; write at least one"),
    "an answer of nothing": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}\n',
        {},
        r"line 1: content of message 2 of messages is null; write it as a text",
    ),
    "no table": ("abc", {"name": "data.parquet"}, r"data.parquet is not a .parquet file \(.*write it again"),
    "no list": ("[1, 2", {"name": "data.json"}, r"data.json is not a .json file \(Expecting.*write it again"),
    "a list of others": ("[1, 2]", {"name": "data.json"}, r"data.json, record 1 is int, not a record"),
    "another file": (
        "abc",
        {"name": "data.csv"},
        r"data are read from .*; give the file the ending of its format, or convert",
    ),
    "no messages": ('{"messages": ["hi"]}\n', {}, r"line 1: messages is not a list of messages"),
    "no answer": ('{"messages": [{"role": "user", "content": "a"}]}\n', {}, r"none of 1 documents has a target token"),
    "blank": ("\n  \n\n", {}, r"none of 0 documents has a target token"),
    "no UTF-8": ('{"text": "\udcff"}\n', {}, r"data.jsonl is not UTF-8 .*convert it first"),
    "empty": ("", {}, r"data.jsonl is empty"),
    "too small a split": (
        '{"text": "abc"}\n' * 9,
        {"eval_split": 0.01},
        r"of 9 pieces of data leaves none to evaluate on",
    ),
    "too large a split": (
        '{"text": "abc"}\n' * 9,
        {"eval_split": 0.99},
        r"of 9 pieces of data leaves none to train on",
    ),
    "no share": ('{"text": "abc"}\n', {"eval_split": 5.0}, r"eval_split is 5.0, but must be a fraction"),
    "no whole step": (
        '{"text": "abc"}\n',
        {"drop_last": True, "micro_batch": 2},
        r"have 1 sequences, but a step takes 2",
    ),
    "no tokenizer": (
        '{"text": "abc"}\n',
        {"tokenizer": "nowhere/tok"},
        r"nowhere/tok has no tokenizer that can be read",
    ),
    "no fast one": (
        '{"text": "abc"}\n',
        {"tokenizer": 3},
        r"int is not a fast tokenizer, .*give one with tokenizer.json",
    ),
    "no batch": ('{"text": "abc"}\n', {"micro_batch": 0}, r"micro_batch is 0; give a whole number from 1 on"),
    "half a batch": ('{"text": "abc"}\n', {"micro_batch": 1.5}, r"micro_batch is 1.5; give a whole number from 1 on"),
    "a seed of another kind": ('{"text": "abc"}\n', {"seed": "a"}, r"seed is 'a'; give a whole number from 0 on"),
    "a share in words": ('{"text": "abc"}\n', {"eval_split": "5%"}, r"eval_split is '5%', but must be a fraction"),
    "one token": ('{"text": "abc"}\n', {"seq_len": 1}, r"seq_len is 1; give a whole number from 2 on, as a token is"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_line(tmp_path: Path, case: str) -> None:
    text, options, message = BAD[case]
    options = dict(options)
    path = tmp_path / options.pop("name", "no.jsonl" if text is None else "data.jsonl")
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises((ValueError, OSError), match=message) as caught:
        ullage.Data(path, **({"tokenizer": TOKENIZER, "seq_len": 20} | options))
    assert "\n" not in str(caught.value)


def test_chat_templates_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    for template, message in (
        (None, "line 1: the record has messages, but the tokenizer has no chat template; put chat_template.jinja"),
        ("{% for message in messages %}{{ message.content + 1 }}{% endfor %}", "line 1: the chat template refuses the"),
        ("{{ raise_exception('no system') }}", "line 1: the chat template refuses the messages: no system; correct"),
        (  # earlier answers are shown otherwise
            "{% for message in messages %}<user>{{ message.content[:(9 if loop.last else 1)] }}{% endfor %}",
            "put {% generation %} and {% endgeneration %} around answers in the template",
        ),
    ):
        with pytest.raises(ValueError, match=r"data.jsonl, line 1") as caught:
            data_of(tmp_path, [{"messages": CHAT}], 80, tokenizer=make_tokenizer(template))
        assert message in str(caught.value)


def test_arguments_of_another_kind_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the data are list; give the path of a file or folder"):
        ullage.Data([tmp_path], TOKENIZER, 20)  # type: ignore[arg-type]
    data = data_of(tmp_path, records(range(8)), 32)
    with pytest.raises(ValueError, match="epochs is '2'; give a whole number from 1 on"):
        list(data.steps("2"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the state is not from Data.state_dict\(\); give such a state"):
        data.load_state_dict({"position": 3})


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    data = data_of(tmp_path, records(range(8)), 32)
    state = data.state_dict()
    with pytest.raises(
        ValueError, match=r"of data whose number of documents is 8, but here it is 9; continue with the same files"
    ):
        data_of(tmp_path, records(range(9)), 32).load_state_dict(state)
    others = [record | {"completion": record["completion"][::-1]} for record in records(range(8))]
    with pytest.raises(
        ValueError, match=r"of data whose digest of tokens is .*, but here it is .*; continue with the same files"
    ):
        data_of(tmp_path, others, 32).load_state_dict(state)
