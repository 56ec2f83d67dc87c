"""Load tokenizers from disk, and turn records into tokens and targets."""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ALPACA: Final = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}{input}\n\n### Response:\n"
)
_KINDS_OF_JSON: Final = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "a record",
}
_PAIRED: Final = ", paired with an input that provides further context"


class Encoded(NamedTuple):
    """A tokenized document.

    Attributes:
        tokens: its tokens.
        targets: for each token, whether it is a target of the loss.
        divisible: whether a long document is divided into several pieces (a text) or truncated (other records).
    """

    tokens: list[int]
    targets: list[bool]
    divisible: bool = False


def tokenizer_at(place: str | Path) -> Any:
    """Load the tokenizer in a folder, or of a hub's model on this machine. Nothing is downloaded.

    Raises:
        ValueError: there is no tokenizer.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second

    try:
        return AutoTokenizer.from_pretrained(str(Path(place).expanduser()), local_files_only=True)
    except Exception as error:  # transformers raises many kinds of errors, with many lines of text
        reason = "no such folder, and no model of this name is on this machine"
        if Path(place).expanduser().exists():
            reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{place} has no tokenizer that can be read ({reason}); give a folder with tokenizer.json, as "
            "save_pretrained() writes it (--tokenizer DIR)"
        ) from error


def checked(tokenizer: Any) -> Any:
    """Check a tokenizer and return it.

    Raises:
        ValueError: it is not a fast tokenizer.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so it has no offsets of tokens; give one with "
            "tokenizer.json: its folder, or AutoTokenizer.from_pretrained(folder)"
        )
    return tokenizer


@final
class Encoder:
    """Turns records into tokens and targets.

    Args:
        tokenizer: a fast tokenizer of ``transformers``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template: str = tokenizer.chat_template or ""
        self._has_generation_blocks = bool(_GENERATION.search(self._template))

    def digest(self) -> str:
        """Return a digest that differs between tokenizers that give different tokens."""
        parts = (self._tokenizer.backend_tokenizer.to_str(), self._template, str(self._tokenizer.eos_token_id))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def text(self, text: str) -> Encoded:
        """Encode a text, in which all tokens are targets."""
        tokens = self._with_end_token(self._tokens(text, special=True))
        return Encoded(tokens, [True] * len(tokens), divisible=True)

    def record(self, record: Mapping[str, Any]) -> Encoded:
        """Encode a record: its fields say whether it is chat, an instruction with an answer, or a text.

        Raises:
            ValueError: the record has other fields, a value has the wrong type, or the chat template refuses the
                record.
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
            ("messages",): lambda messages, record: self._chat(_messages(messages, "messages"), record),
            ("prompt", "completion"): self._prompted,
            ("instruction", "output"): self._alpaca,
            ("text",): lambda text, _: self.text(_text(text, "text")),
        }

    def _prompted(self, prompt: object, completion: object, record: Mapping[str, Any]) -> Encoded:
        if isinstance(prompt, list) and isinstance(completion, list):
            prompts = _messages(prompt, "prompt")
            return self._chat([*prompts, *_messages(completion, "completion")], record, len(prompts))
        if isinstance(prompt, list) or isinstance(completion, list):
            raise ValueError(  # noqa: TRY004 - the file is wrong, not a call
                "only one of prompt and completion is a list of messages; write both as lists, or both as texts"
            )
        return self._answered(_text(prompt, "prompt"), _text(completion, "completion"))

    def _alpaca(self, instruction: object, output: object, record: Mapping[str, Any]) -> Encoded:
        more = _text(record.get("input") or "", "input")
        prompt = _ALPACA.format(
            paired=_PAIRED if more else "",
            instruction=_text(instruction, "instruction"),
            input=f"\n\n### Input:\n{more}" if more else "",
        )
        return self._answered(prompt, _text(output, "output"))

    def _answered(self, prompt: str, answer: str) -> Encoded:
        """Encode a prompt and its answer. Only the answer, with its end token, is a target."""
        prompt_ids = self._tokens(prompt, special=True)
        if (
            prompt_ids and prompt_ids[-1] == self._tokenizer.eos_token_id
        ):  # some tokenizers append the end token to every text
            prompt_ids.pop()
        answered = self._with_end_token(self._tokens(answer, special=False))
        return Encoded(prompt_ids + answered, [False] * len(prompt_ids) + [True] * len(answered))

    def _chat(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], num_prompts: int = 0) -> Encoded:
        """Encode messages. Answers after the first ``num_prompts`` messages are targets."""
        if not self._template:
            raise ValueError(
                "the record has messages, but the tokenizer has no chat template; put chat_template.jinja beside "
                "tokenizer.json"
            )
        try:
            return self._templated(messages, record.get("tools"), num_prompts)
        except ImportError as error:
            raise ModuleNotFoundError(
                "chat templates need jinja2; pip install 'ullage[finetune]'", name="jinja2"
            ) from error
        except Exception as error:  # a template may add a list to a text, or read a field that is not there
            if isinstance(error, ValueError) and not type(error).__module__.startswith("jinja2"):
                raise
            raise ValueError(
                f"the chat template refuses the messages: {error}; correct them (content may have to be a text), or "
                "the template"
            ) from error

    def _templated(self, messages: Sequence[Mapping[str, Any]], tools: object, num_prompts: int) -> Encoded:
        unlearned = [number for number, message in enumerate(messages) if message.get("weight") == 0]
        if self._has_generation_blocks:
            tokens, is_answer = self._marked(messages, tools)

            def num_before(number: int) -> int:
                return sum(self._marked(messages[:number], tools)[1]) if number else 0

            left = [range(num_before(number) + 1, num_before(number + 1) + 1) for number in unlearned]
            left.append(range(1, num_before(num_prompts) + 1))
            counts = itertools.accumulate(is_answer)
            return Encoded(
                tokens,
                [
                    bool(answers) and not any(count in part for part in left)
                    for answers, count in zip(is_answer, counts, strict=True)
                ],
            )

        def shown(part: Sequence[Mapping[str, Any]], *, asks: bool) -> str:
            text: str = self._tokenizer.apply_chat_template(
                part, tools=tools, tokenize=False, add_generation_prompt=asks
            )
            return text

        def shown_before(number: int) -> str:
            """Return the text before an answer.

            Templates cannot render an empty chat. So for the first message, render a question, and take the text that
            marks the beginning of its answer.
            """
            if number:
                return shown(messages[:number], asks=True)
            question = [{"role": "user", "content": "?"}]
            begin = shown(question, asks=True).removeprefix(shown(question, asks=False))
            return whole[: whole.find(begin) + len(begin)]

        whole = shown(messages, asks=False)
        answers = []
        for number in range(num_prompts, len(messages)):
            if messages[number]["role"] != "assistant" or number in unlearned:
                continue
            before, after = shown_before(number), shown(messages[: number + 1], asks=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    "the chat template renders an answer differently if messages follow, so its tokens cannot be "
                    "found; put {% generation %} and {% endgeneration %} around answers in the template"
                )
            answers.append(range(len(before), len(after)))
        made = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        targets = [any(begin in answer and end > begin for answer in answers) for begin, end in made["offset_mapping"]]
        return Encoded(list(made["input_ids"]), targets)

    def _marked(self, messages: Sequence[Mapping[str, Any]], tools: object) -> tuple[list[int], list[int]]:
        """Return tokens, and 1 for each that the template marks as part of an answer."""
        made = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(made["input_ids"]), list(made["assistant_masks"])

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _with_end_token(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        kind = _KINDS_OF_JSON.get(type(value), type(value).__name__)
        raise ValueError(f"{name} is {kind}; write it as a text in quotation marks")  # noqa: TRY004 - the file
    return value


def _messages(value: object, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value
    ):
        raise ValueError(f'{name} is not a list of messages; write a list of {{"role": ..., "content": ...}}')
    if not value:
        raise ValueError(f"{name} is an empty list; write at least one message, or leave the record out")
    for number, message in enumerate(value, 1):
        has_more = message.keys() - {"role", "content", "name", "weight"}  # such as tool calls
        if (weight := message.get("weight", 1)) not in (0, 1):
            raise ValueError(f"weight of message {number} of {name} is {weight!r}; write 1, or 0 for no target")
        if not isinstance(message.get("content"), list) and not (message.get("content") is None and has_more):
            _text(message.get("content"), f"content of message {number} of {name}")
    return value
