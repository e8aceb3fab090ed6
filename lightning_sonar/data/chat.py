"""Chats in the words of a tokenizer's own chat template, with what counts for the loss told apart."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lightning_sonar.data.records import Chat, Record, Segment, Turn

__all__ = ["ChatTemplate", "ChatTemplateWarning", "has_template", "special_tokens", "templated"]

ChatTemplate = Literal["auto", "none"]
"""Whether the tokenizer's chat template is used where there is one."""


class ChatTemplateWarning(UserWarning):
    """Some records could not be put into the tokenizer's chat template so that their answers can be told apart."""


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Every special token and its id, those included that the tokenizer only marks as such, like <|im_end|>."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {str(token.content): index for index, token in added.items() if token.special}
    return marked | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def templated(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> list[tuple[Segment, ...] | None]:
    """The segments of each record in the tokenizer's chat template; None for a record that does not fit it.

    The prompt of an answer is what the template gives for the messages before it with its generation prompt, which is
    what the model will be asked with; the answer is what the template adds to that, up to and with its last special
    token. Where the prompt is not the beginning of the whole, an earlier answer counts no longer, or the record stays
    in the plain form; a `ChatTemplateWarning` says how many and why.
    """
    found: list[tuple[Segment, ...] | None] = []
    reasons: Counter[str] = Counter()
    specials = list(special_tokens(tokenizer))
    for record in records:
        segments = None
        if not isinstance(record, Chat):
            reasons["a record is no chat"] += 1
        elif any(token in text for _, text in record.turns for token in specials):
            # In the template's text they could not be told from the template's own.
            reasons["a message spells out one of the tokenizer's special tokens"] += 1
        else:
            segments, reason = _segments(record.turns, tokenizer, specials)
            if reason:
                reasons[reason] += 1
        found.append(segments)
    if reasons:
        listed = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common(4))
        warnings.warn(
            f"{sum(reasons.values())} of {len(records)} records do not wholly fit the tokenizer's chat template: "
            f"{listed}. data.chat_template=none uses the plain form for all.",
            ChatTemplateWarning,
            stacklevel=2,
        )
    return found


def _segments(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, specials: Sequence[str]
) -> tuple[tuple[Segment, ...] | None, str]:
    """Segments, or None, and why not every answer of them counts."""
    answers = [index for index, (role, _) in enumerate(turns) if role == "assistant"]
    try:
        whole = _chain(turns, answers, tokenizer, specials)
        if whole is not None:
            return whole, ""
        last = _chain(turns, answers[-1:], tokenizer, specials)
    except Exception as error:  # a template is a program, and raises what it likes
        first = str(error).partition("\n")[0]
        return None, f"the template refuses it ({type(error).__name__}: {first}), so it keeps the plain form"
    if last is None:
        return None, "the template's generation prompt does not begin the answer, so it keeps the plain form"
    return last, "the template changes earlier answers, so only the last one counts"


def _chain(
    turns: Sequence[Turn], answers: Sequence[int], tokenizer: PreTrainedTokenizerBase, specials: Sequence[str]
) -> tuple[Segment, ...] | None:
    """The whole chat's text cut at its answers; None if the texts do not begin one another."""
    segments: list[Segment] = []
    done, done_end = "", 0  # the text so far, and how much of it stands in segments
    for index in answers:
        prompt = _render(turns[:index], tokenizer, generation=True)
        text = _render(turns[: index + 1], tokenizer, generation=False)
        if not prompt.startswith(done) or not text.startswith(prompt):
            return None
        end = _end(text, len(prompt), specials)
        segments += [(prompt[done_end:], False), (text[len(prompt) : end], True)]
        done, done_end = text, end
    return tuple(segments)


def _end(text: str, start: int, specials: Sequence[str]) -> int:
    """Where the answer that begins at `start` ends: behind the template's last special token, if it writes one."""
    ends = [at + len(token) for token in specials if (at := text.rfind(token, start)) >= 0]
    return max(ends, default=len(text))


def _render(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, generation: bool) -> str:
    messages: Any = [{"role": role, "content": text} for role, text in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation))
