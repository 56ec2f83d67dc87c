"""Tokenizers and files of data for tests."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<end>")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<end>{% endgeneration %}{% else %}{{ message.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 100 tokens: one per printable character of ASCII, and special ones."""
    letters = {chr(code): number for number, code in enumerate(range(32, 127), len(SPECIAL))}
    made = Tokenizer(models.WordLevel(dict(zip(SPECIAL, range(len(SPECIAL)), strict=True)) | letters, unk_token="~"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="~")  # noqa: S106
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    tokenizer.chat_template = template
    return tokenizer


def lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
