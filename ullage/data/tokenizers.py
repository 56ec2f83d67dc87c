"""Tokenizers from disk, and the tokens and targets that they make of records."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ALPACA: Final = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}{input}\n\n### Response:\n"
)
_PAIRED: Final = ", paired with an input that provides further context"


class Encoded(NamedTuple):
    """A document.

    Attributes:
        tokens: of it.
        targets: for each, whether it is learned to be predicted.
        divisible: whether a long one is cut into several pieces: a text, of which each part makes sense. Others are cut
            off.
    """

    tokens: list[int]
    targets: list[bool]
    divisible: bool = False


def tokenizer_at(place: str | Path) -> Any:
    """Return the tokenizer in a folder, or that of a hub's model that is on this machine; nothing is downloaded.

    Raises:
        ValueError: there is none.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second

    try:
        return AutoTokenizer.from_pretrained(str(Path(place).expanduser()), local_files_only=True)
    except Exception as error:  # transformers raises many kinds, with texts of many lines
        reason = "no such folder, and no model of this name is on this machine"
        if Path(place).expanduser().exists():
            reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{place} has no tokenizer that can be read ({reason}); give a folder with tokenizer.json, as "
            "save_pretrained() writes it (--tokenizer DIR)"
        ) from error


def checked(tokenizer: Any) -> Any:
    """Return a tokenizer that can be used.

    Raises:
        ValueError: it is no fast one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer, and cannot say where tokens are in a text; give one "
            "with tokenizer.json: its folder, or AutoTokenizer.from_pretrained(folder)"
        )
    return tokenizer


@final
class Encoder:
    """Makes tokens and targets of records.

    Args:
        tokenizer: of ``transformers``, with ``tokenizer.json``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template: str = tokenizer.chat_template or ""
        self._marks_answers = bool(_GENERATION.search(self._template))

    def digest(self) -> str:
        """Return what differs between tokenizers that make other tokens."""
        parts = (self._tokenizer.backend_tokenizer.to_str(), self._template, str(self._tokenizer.eos_token_id))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def text(self, text: str) -> Encoded:
        """Return a text, all of which is learned."""
        tokens = self._ended(self._tokens(text, special=True))
        return Encoded(tokens, [True] * len(tokens), divisible=True)

    def record(self, record: Mapping[str, Any]) -> Encoded:
        """Return a record: chat, an instruction with its answer, or a text, whichever fields it has.

        Raises:
            ValueError: it has none of them, or values of another kind, or the chat template refuses it.
        """
        for names, encode in self._kinds().items():
            if record.keys() >= set(names):
                return encode(*(record[name] for name in names), record)
        has = ", ".join(map(str, record)) or "nothing"
        raise ValueError(
            f"the record has {has}; name its fields text, or messages, or prompt and completion, or instruction and "
            "output (and input)"
        )

    def _kinds(self) -> dict[tuple[str, ...], Callable[..., Encoded]]:
        return {
            ("messages",): self._chat,
            ("prompt", "completion"): lambda prompt, completion, _: self._answered(
                _text(prompt, "prompt"), _text(completion, "completion")
            ),
            ("instruction", "output"): self._alpaca,
            ("text",): lambda text, _: self.text(_text(text, "text")),
        }

    def _alpaca(self, instruction: object, output: object, record: Mapping[str, Any]) -> Encoded:
        more = _text(record.get("input") or "", "input")
        prompt = _ALPACA.format(
            paired=_PAIRED if more else "",
            instruction=_text(instruction, "instruction"),
            input=f"\n\n### Input:\n{more}" if more else "",
        )
        return self._answered(prompt, _text(output, "output"))

    def _answered(self, prompt: str, answer: str) -> Encoded:
        """Return a prompt as the model is asked it, and its answer, which alone is learned, with its end."""
        asked = self._tokens(prompt, special=True)
        if asked and asked[-1] == self._tokenizer.eos_token_id:  # that some tokenizers put behind every text
            asked.pop()
        answered = self._ended(self._tokens(answer, special=False))
        return Encoded(asked + answered, [False] * len(asked) + [True] * len(answered))

    def _chat(self, messages: object, record: Mapping[str, Any]) -> Encoded:
        if not self._template:
            raise ValueError(
                "the record has messages, but the tokenizer has no chat template; put chat_template.jinja beside "
                "tokenizer.json"
            )
        if not isinstance(messages, Sequence) or not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
        ):
            raise ValueError('messages are not a list of {"role": ..., "content": ...}; write them so')
        try:
            return self._templated(messages, record.get("tools"))
        except ImportError as error:
            raise ModuleNotFoundError(
                "chat templates need jinja2; pip install 'ullage[finetune]'", name="jinja2"
            ) from error
        except Exception as error:
            if not type(error).__module__.startswith("jinja2"):
                raise
            raise ValueError(
                f"the chat template refuses the messages: {error}; correct them, or the template"
            ) from error

    def _templated(self, messages: Sequence[Mapping[str, Any]], tools: object) -> Encoded:
        if self._marks_answers:
            made = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return Encoded(list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]])

        def shown(count: int, *, asks: bool) -> str:
            text: str = self._tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, add_generation_prompt=asks
            )
            return text

        whole = shown(len(messages), asks=False)
        answers = []
        for number in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            before, after = shown(number, asks=True), shown(number + 1, asks=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    "the chat template shows an answer otherwise if more follows, so that its tokens cannot be found; "
                    "put {% generation %} and {% endgeneration %} around answers in the template"
                )
            answers.append(range(len(before), len(after)))
        made = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        targets = [any(begin in answer and end > begin for answer in answers) for begin, end in made["offset_mapping"]]
        return Encoded(list(made["input_ids"]), targets)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}; write it as a text in quotation marks")  # noqa: TRY004 - the file
    return value
