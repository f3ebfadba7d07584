import pytest

from longarc.errors import CheckpointError
from longarc.tokens.chatml import ChatMlFormat
from token_samples import (
    BASH,
    assistant,
    call,
    chatml_tokenizer,
    qwen_tokenizer,
    small_tokenizer,
    system,
    tool,
    user,
)

SMOL = ChatMlFormat(chatml_tokenizer())
QWEN = ChatMlFormat(qwen_tokenizer())


def parse(text, *, thinking=False, chat_format=SMOL):
    ids = chat_format.tokenizer.encode(text)
    return chat_format.parse([*ids, chat_format.stop_ids[0]], [BASH], thinking=thinking)


def test_a_default_system_text_is_used_only_where_there_is_none():
    chat_format = ChatMlFormat(chatml_tokenizer(), default_system="Be kind.")

    def text(messages):
        rendered = chat_format.render(messages, thinking=False, add_generation_prompt=False)
        return chat_format.tokenizer.decode(rendered.token_ids, keep_special=True)

    assert text([user("q")]).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user")
    assert "kind" not in text([system("s"), user("q")])


def test_tags_are_control_tokens_where_the_vocabulary_has_them():
    messages = [user("q"), assistant("", calls=(call("bash", command="ls"),)), tool("r")]
    for chat_format in (SMOL, QWEN):
        ids = chat_format.render(
            messages, [BASH], thinking=True, clear_thinking=False, add_generation_prompt=True
        ).token_ids
        special = chat_format.tokenizer.special_tokens
        assert ids.count(special.get("<tool_response>", -1)) == (chat_format is QWEN)
        assert ids.count(special.get("<tool_call>", -1)) == (3 if chat_format is QWEN else 0)


@pytest.mark.parametrize("chat_format", [SMOL, QWEN])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_stored_turn_and_tail_spell_what_a_whole_render_spells(chat_format, is_stopped):
    messages = [
        user("q"),
        assistant("a", reasoning="r", calls=(call("bash", command="ls"),)),
        tool("one"),
        tool("two"),
        user("go on"),
    ]
    options = {"thinking": True, "clear_thinking": False, "add_generation_prompt": True}
    whole = chat_format.render(messages, [BASH], **options).token_ids
    stored = chat_format.render(
        messages[:2], [BASH], thinking=True, clear_thinking=False, add_generation_prompt=False
    ).token_ids
    end = len(stored) - stored[::-1].index(chat_format.stop_ids[0])
    stop_id = stored[end - 1] if is_stopped else None
    tail = chat_format.render_tail(messages[2:], previous_stop_id=stop_id, thinking=True)
    decode = chat_format.tokenizer.decode
    kept = stored[: end if is_stopped else end - 1]
    assert decode(kept + tail, keep_special=True) == decode(whole, keep_special=True)


@pytest.mark.parametrize("chat_format", [SMOL, QWEN])
def test_what_was_rendered_is_read_back(chat_format):
    message = assistant(
        "text",
        reasoning="why",
        calls=(call("bash", command=" a\n"), call("f", call_id="call_1", x=1)),
    )
    rendered = chat_format.render([user("q"), message], thinking=True, add_generation_prompt=False)
    pairs = zip(rendered.token_ids, rendered.train_mask, strict=True)
    turn = chat_format.parse([t for t, m in pairs if m], [BASH], thinking=True)
    assert turn.message == message
    assert turn.problems == ()


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        ('{"name": "bash", "arguments": {"cmd": "ls"', "bash", "cannot be read"),
        ("[1]", "", "names no function"),
        ('{"name": 3, "arguments": {}}', "", "names no function"),
        ('{"name": "bash", "arguments": [1]}', "bash", "must be a JSON object"),
        ('{"name": "bash", "arguments": "{"}', "bash", "not JSON"),
        ('{"name": "bash", "arguments": {"a": NaN}}', "bash", "NaN is not JSON"),
    ],
)
def test_a_malformed_call_is_kept_with_its_error_and_the_next_one_still_runs(body, name, reason):
    good = '<tool_call>\n{"name": "bash", "arguments": "{\\"command\\": \\"pwd\\"}"}\n</tool_call>'
    turn = parse(f"<tool_call>\n{body}\n</tool_call>\n{good}")
    bad, fine = turn.message.tool_calls
    assert (bad.name, bad.arguments) == (name, {})
    assert reason in bad.error
    assert (fine.error, fine.arguments) == (None, {"command": "pwd"})
    assert len(turn.problems) == 1


def test_empty_arguments_mean_none_and_an_open_call_is_an_error():
    (one, two) = parse(
        '<tool_call>{"name": "f", "arguments": ""}</tool_call><tool_call>{"name": "g"}'
    ).message.tool_calls
    assert (one.error, one.arguments) == (None, {})
    assert "not closed" in two.error


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("A", False, None, "A"),
        ("<think>\nR\n</think>\n\nA", False, "R", "A"),
        ("R</think>A", True, "R", "A"),
        ("R", True, "R", ""),
    ],
)
def test_reasoning_is_split_off(text, thinking, reasoning, content):
    message = parse(text, thinking=thinking).message
    assert (message.reasoning, message.content) == (reasoning, content)


def test_a_tokenizer_of_another_family_is_refused():
    with pytest.raises(CheckpointError, match="im_end"):
        ChatMlFormat(small_tokenizer())
