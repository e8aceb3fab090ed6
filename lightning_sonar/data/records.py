"""The one internal form of a record: text segments, each marked as counting for the loss or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_sonar.data.errors import DataError

__all__ = ["Chat", "Record", "Segment", "Turn", "from_alpaca", "from_messages"]

Segment = tuple[str, bool]
"""A text and whether its tokens count for the loss."""

Record = tuple[Segment, ...]

Turn = tuple[str, str]
"""A speaker's role (user, assistant, system, ...) and what it says."""


class Chat(tuple[Segment, ...]):
    """A record that knows its messages, for tokenizers with a chat template of their own.

    As a tuple it is the record in the plain form: equal to, and hashed as, any record of the same segments.

    Args:
        segments: the plain form.
        turns: the messages, of which the last one is the assistant's.
    """

    turns: tuple[Turn, ...]

    def __new__(cls, segments: Iterable[Segment], turns: Iterable[Turn]) -> Chat:
        made = super().__new__(cls, segments)
        made.turns = tuple(turns)
        return made

    def __getnewargs__(self) -> tuple[tuple[Segment, ...], tuple[Turn, ...]]:  # type: ignore[override]
        return tuple(self), self.turns


_RESPONSE = "### Response:\n"
_HEADINGS = {"user": "### Instruction:\n", "assistant": _RESPONSE, "system": "### System:\n"}
# ShareGPT files name the same speakers differently.
_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "developer": "system",
}


def from_alpaca(instruction: str, input: str | None, output: str) -> Record:
    """A record in Alpaca's form; an empty `input` leaves its section out."""
    prompt = f"### Instruction:\n{instruction}\n\n"
    if input:
        prompt += f"### Input:\n{input}\n\n"
    question = f"{instruction}\n\n{input}" if input else instruction
    return Chat(((prompt + _RESPONSE, False), (output, True)), (("user", question), ("assistant", output)))


def from_messages(messages: Sequence[Mapping[str, Any]]) -> Record:
    """A record from chat messages, `role`/`content` or ShareGPT's `from`/`value`.

    Only what the assistant says counts for the loss. Whatever follows its last message is left out,
    since no answer to learn depends on it.
    """
    turns = [_turn(message, number) for number, message in enumerate(messages, start=1)]
    while turns and turns[-1][0] != "assistant":
        turns.pop()
    if not turns:
        raise DataError(
            f"the chat has no assistant message ({len(messages)} in all), so there is nothing to learn from; "
            "expected at least one message with role 'assistant'"
        )
    segments: list[Segment] = []
    pending = ""  # prompt text up to the next answer, one segment, so that it is tokenized as a whole
    for role, content in turns:
        pending += _HEADINGS.get(role, f"### {role.capitalize()}:\n")
        if role == "assistant":
            segments += [(pending, False), (content, True)]
            pending = "\n\n"
        else:
            pending += f"{content}\n\n"
    return Chat(segments, turns)


def _turn(message: Any, number: int) -> tuple[str, str]:
    """The role and the text of one message."""
    if not isinstance(message, Mapping):
        raise DataError(f"message {number} is {_kind(message)}; expected an object with role and content")
    for role_key, text_key in (("role", "content"), ("from", "value")):
        if role_key in message and text_key in message:
            break
    else:
        raise DataError(
            f"message {number} has the keys {', '.join(map(repr, message)) or 'none'}; "
            "expected 'role' and 'content' (or 'from' and 'value')"
        )
    role, content = message[role_key], message[text_key]
    if not isinstance(role, str) or not role:
        raise DataError(f"{role_key!r} of message {number} is {_kind(role)}; expected text such as 'user'")
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise DataError(f"{text_key!r} of message {number} is {_kind(content)}; expected text")
    role = role.lower()
    return _ROLES.get(role, role), content


def _kind(value: Any) -> str:
    """How an error names a value's type."""
    if value is None:
        return "null"
    if value == "":
        return "empty"
    return f"of type {type(value).__name__}"
