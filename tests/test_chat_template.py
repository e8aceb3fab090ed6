"""Records in the words of a tokenizer's own chat template: what stands there, and what counts for the loss."""

from __future__ import annotations

import pickle
import warnings

import pytest

from lightning_sonar.data import (
    IGNORED,
    Chat,
    ChatTemplateWarning,
    DataError,
    InstructionData,
    encode,
    encode_all,
    from_alpaca,
    from_messages,
    train_tokenizer,
)

# The shape of ChatML: what a role says stands between two special tokens, and a line break follows.
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# An answer is followed by the end token at once; a system message is refused, as several templates do.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# Thoughts are shown for the last answer only, as in templates of reasoning models.
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# The generation prompt opens a thought that a finished chat does not hold.
OPENED = CHATML.replace("<|start|>assistant\n{% endif %}", "<|start|>assistant\n<think>\n{% endif %}")
UNENDED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TURN = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "One more than one."}]
MORE = [*TURN, {"role": "user", "content": "And three?"}, {"role": "assistant", "content": "Two more."}]


@pytest.fixture(scope="module")
def base():
    return train_tokenizer([f"word {number} user assistant: ### Response:\n" for number in range(50)], 300)


@pytest.fixture
def tokenizer(base):
    def make(template):
        made = pickle.loads(pickle.dumps(base))
        made.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|stop|>"]})
        made.chat_template = template
        return made

    return make


def text(example, tokenizer):
    return tokenizer.decode(example.input_ids)


def counted(example, tokenizer):
    return tokenizer.decode([label for label in example.labels if label != IGNORED])


def test_a_record_stands_in_the_template_and_its_answer_with_the_end_marker_counts(tokenizer):
    made = tokenizer(CHATML)
    example = encode(from_messages(TURN), made, 256)
    assert text(example, made) == "<|start|>user\nWhat is two?<|stop|>\n<|start|>assistant\nOne more than one.<|stop|>"
    assert counted(example, made) == "One more than one.<|stop|>"


def test_the_prompt_is_what_the_model_will_be_asked_with(tokenizer):
    made = tokenizer(CHATML)
    example = encode(from_messages(TURN), made, 256)
    prompt = made.apply_chat_template(TURN[:1], add_generation_prompt=True, return_dict=False)
    assert example.input_ids[: len(prompt)] == prompt
    assert set(example.labels[: len(prompt)]) == {IGNORED}
    assert IGNORED not in example.labels[len(prompt) :]


def test_every_answer_of_a_chat_counts_and_what_stands_between_does_not(tokenizer):
    made = tokenizer(CHATML)
    example = encode(from_messages(MORE), made, 256)
    assert text(example, made) + "\n" == made.apply_chat_template(MORE, tokenize=False)
    assert counted(example, made) == "One more than one.<|stop|>Two more.<|stop|>"


def test_an_alpaca_record_is_a_question_with_its_input_and_an_answer(tokenizer):
    made = tokenizer(CHATML)
    example = encode(from_alpaca("Add.", "1 and 2", "3"), made, 256)
    assert text(example, made) == "<|start|>user\nAdd.\n\n1 and 2<|stop|>\n<|start|>assistant\n3<|stop|>"
    assert counted(example, made) == "3<|stop|>"


def test_an_end_token_that_the_template_writes_stands_once(tokenizer):
    made = tokenizer(MISTRAL)
    example = encode(from_messages(MORE), made, 256)
    assert counted(example, made) == f" One more than one.{made.eos_token} Two more.{made.eos_token}"
    assert example.input_ids.count(made.eos_token_id) == 2


def test_an_answer_without_an_end_marker_gets_the_end_token(tokenizer):
    made = tokenizer(UNENDED)
    example = encode(from_messages(TURN), made, 256)
    assert counted(example, made) == f"One more than one.\n{made.eos_token}"


def test_a_tokenizer_without_a_template_keeps_the_plain_form(tokenizer):
    record = from_messages(TURN)
    assert encode(record, tokenizer(None), 256) == encode(record, tokenizer(CHATML), 256, chat_template="none")
    assert "### Response:" in text(encode(record, tokenizer(None), 256), tokenizer(None))


def test_earlier_answers_that_the_template_changes_do_not_count_and_a_warning_says_so(tokenizer):
    made = tokenizer(THINKING)
    with pytest.warns(ChatTemplateWarning, match="1 of 2 records .*: 1 because the template changes earlier answers"):
        (single, double), dropped = encode_all([from_messages(TURN), from_messages(MORE)], made, 256)
    assert dropped == 0
    assert counted(single, made) == "<think></think>One more than one.<|stop|>"
    assert text(double, made) + "\n" == made.apply_chat_template(MORE, tokenize=False)
    assert counted(double, made) == "<think></think>Two more.<|stop|>"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (OPENED, TURN, "generation prompt does not begin the answer, so it keeps the plain form"),
        (MISTRAL, [{"role": "system", "content": "Be kind."}, *TURN], "TemplateError: Only user and assistant roles"),
        (
            CHATML,
            [{"role": "user", "content": "a<|stop|>"}, TURN[1]],
            "spells out one of the tokenizer's special tokens",
        ),
    ],
)
def test_a_record_that_does_not_fit_keeps_the_plain_form_and_a_warning_says_why(tokenizer, template, messages, reason):
    made, record = tokenizer(template), from_messages(messages)
    with pytest.warns(ChatTemplateWarning, match=f"1 of 1 records .*{reason}.*data.chat_template=none"):
        example = encode(record, made, 256)
    assert example == encode(record, made, 256, chat_template="none")


def test_segments_without_messages_keep_the_plain_form(tokenizer):
    with pytest.warns(ChatTemplateWarning, match="a record is no chat"):
        example = encode((("a", False), ("b", True)), tokenizer(CHATML), 256)
    assert counted(example, tokenizer(CHATML)) == f"b{tokenizer(CHATML).eos_token}"


def test_a_chat_equals_its_plain_form_and_survives_pickling():
    record = from_messages(MORE)
    assert isinstance(record, Chat)
    assert record == tuple(record)
    assert hash(record) == hash(tuple(record))
    again = pickle.loads(pickle.dumps(record))
    assert (again, again.turns) == (record, record.turns)


def test_the_data_module_uses_the_template_unless_told_not_to(tokenizer, tmp_path):
    made = tokenizer(CHATML)
    rows = "".join(f'{{"instruction": "Say {n}.", "output": "{n}"}}\n' for n in range(20))
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    found = {}
    for choice in ("auto", "none"):
        data = InstructionData("json", str(path), tokenizer=made, chat_template=choice)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data.setup()
        found[choice] = text(data.train_set[0], made)
    assert found["auto"].startswith("<|start|>user\nSay ")
    assert found["none"].startswith("### Instruction:\nSay ")


def test_an_unknown_choice_is_explained():
    with pytest.raises(DataError, match="chat_template='yes': expected one of auto, none"):
        InstructionData(chat_template="yes")
