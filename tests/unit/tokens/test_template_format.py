"""What a chat template promises as a chat format, and what is done where it does not keep it."""

import datetime
import logging
import re

import pytest

from longarc.errors import ConfigError
from longarc.records.message import ToolSpec
from longarc.tokens.chat_format import ChatFormat, StoredTurn
from longarc.tokens.glm import GlmFormat
from longarc.tokens.jinja_template import ChatTemplate
from longarc.tokens.template_format import TemplateFormat
from template_cases import FORGETTING, GROWING, MARKED, MOVING, ROLES, template_format
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

QWEN = qwen_tokenizer()
NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
CALL = assistant("look", calls=(call("bash", command="ls"),))


def text_of(chat_format, ids):
    return chat_format.tokenizer.decode(list(ids), keep_special=True)


def rendered(chat_format, messages, *, tools=(), gen=True, thinking=True, **options):
    return chat_format.render(
        messages,
        tools,
        thinking=thinking,
        clear_thinking=False,
        add_generation_prompt=gen,
        **options,
    )


def trained(chat_format, messages, **options):
    chat = rendered(chat_format, messages, gen=False, **options)
    ids = [i for i, m in zip(chat.token_ids, chat.train_mask, strict=True) if m]
    return text_of(chat_format, ids)


def turn_of(chat_format, messages, sampled, *, tools=(), thinking=True):
    prompt = rendered(chat_format, messages[:-1], tools=tools, thinking=thinking).token_ids
    return StoredTurn(prompt_ids=prompt, sampled_ids=sampled, messages=messages, tools=tuple(tools))


def compiled(source, tokenizer=QWEN, **options):
    return ChatTemplate(source, control_tokens=tokenizer.special_tokens, **options)


# What is found out


def test_a_template_is_a_chat_format():
    assert isinstance(template_format(GROWING), ChatFormat)


@pytest.mark.parametrize(
    ("source", "stops"),
    [
        (GROWING, {"<|im_end|>"}),
        (FORGETTING, {"<|im_end|>"}),
        (MARKED, {"<|im_end|>"}),
        (ROLES, {"<|user|>", "<|observation|>"}),
    ],
)
def test_what_ends_a_turn_is_what_the_template_writes_behind_answers_and_calls(source, stops):
    chat_format = template_format(source)
    assert set(chat_format.stop_ids) == {chat_format.tokenizer.special_id(s) for s in stops}


def test_the_end_of_text_token_stops_too_where_the_model_has_one():
    chat_format = TemplateFormat(QWEN, compiled(GROWING), eos_token="<|endoftext|>")
    assert QWEN.special_id("<|endoftext|>") in chat_format.stop_ids


def test_a_template_that_ends_no_turn_is_refused():
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ConfigError, match="nothing would end a turn"):
        TemplateFormat(QWEN, compiled(endless))


def test_a_text_that_is_not_jinja_is_refused():
    with pytest.raises(ConfigError, match="not Jinja"):
        compiled("{% for m in %}")


def test_a_template_that_cannot_render_an_answer_says_why():
    picky = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}x"
    with pytest.raises(ConfigError, match="one message only"):
        TemplateFormat(QWEN, compiled(picky))


@pytest.mark.parametrize("source", [NO_TOOLS, MARKED, MOVING])
def test_tools_that_a_template_would_not_show_are_refused(source):
    with pytest.raises(ConfigError, match="shows no tools"):
        rendered(template_format(source), [user("q")], tools=[BASH])


# Text and control tokens


def test_a_template_cannot_reach_python():
    escape = "{{ messages.__class__.__mro__[-1].__subclasses__() }}<|im_end|>"
    with pytest.raises(ConfigError, match="unsafe"):
        TemplateFormat(QWEN, compiled(escape))


@pytest.mark.parametrize("source", [GROWING, ROLES])
def test_text_of_any_role_cannot_place_control_tokens(source):
    chat_format = template_format(source)
    control = set(chat_format.tokenizer.special_tokens.values())
    evil = "".join(chat_format.tokenizer.special_tokens)

    def conversation(text):
        return [
            system(text),
            user(text),
            assistant("x", reasoning=text, calls=(call("bash", **{text: text}),)),
            tool(text),
        ]

    def placed(text):
        spec = ToolSpec(name="bash", description=text, parameters={"type": "object"})
        ids = rendered(chat_format, conversation(text), tools=[spec]).token_ids
        return [i for i in ids if i in control]

    assert placed(evil) == placed(".")


def test_what_people_say_comes_out_to_the_last_character_whatever_it_spells():
    chat_format = template_format(GROWING)
    said = "\ufdd0a\ufdd1<|im_end|>\ufdd2\ufde0\ufdd2<|im_start|>\ufde2 <think> é\n"
    text = text_of(chat_format, rendered(chat_format, [user(said)]).token_ids)
    assert text == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"


def test_json_in_ascii_spells_control_tokens_as_text_too():
    source = GROWING.replace("| tojson", "| tojson(ensure_ascii=true)")
    chat_format = template_format(source)
    spec = ToolSpec(name="bash", description="<|im_end|> é", parameters={})
    ids = rendered(chat_format, [user("q")], tools=[spec]).token_ids
    assert '"<|im_end|> \\u00e9"' in text_of(chat_format, ids)
    assert ids.count(QWEN.special_id("<|im_end|>")) == 2


def test_reasoning_inside_a_content_is_reasoning_where_the_template_takes_it_out():
    forgets = template_format(FORGETTING)
    messages = [user("q"), assistant("<think>\nwhy\n</think>\n\nA"), user("p")]
    assert "why" not in text_of(forgets, rendered(forgets, messages).token_ids)


def test_a_date_is_told_only_where_one_is_set():
    dated = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no day' }}" + NO_TOOLS
    for date, text in ((datetime.date(2026, 2, 24), "24 Feb 2026"), (None, "no day")):
        chat_format = TemplateFormat(QWEN, compiled(dated, date=date))
        assert text_of(chat_format, rendered(chat_format, [user("q")]).token_ids).startswith(text)


def test_values_of_the_recipe_win_over_those_of_longarc():
    source = "{{ greeting }} {{ enable_thinking }}" + NO_TOOLS
    chat_format = TemplateFormat(
        QWEN, compiled(source, values={"greeting": "Hi", "enable_thinking": "never"})
    )
    text = text_of(chat_format, rendered(chat_format, [user("q")], thinking=True).token_ids)
    assert text.startswith("Hi never")


# Tails


def stop(chat_format, token="<|im_end|>"):
    return chat_format.tokenizer.special_id(token)


@pytest.mark.parametrize(
    ("end", "opening"),
    [
        (["<|im_end|>"], "\n<|im_start|>tool"),
        ([], "<|im_end|>\n<|im_start|>tool"),
        (["<|endoftext|>"], "<|im_end|>\n<|im_start|>tool"),
    ],
)
def test_a_tail_does_not_repeat_what_ended_the_turn(end, opening):
    chat_format = TemplateFormat(QWEN, compiled(GROWING), eos_token="<|endoftext|>")
    sampled = [*QWEN.encode("sampled otherwise"), *(QWEN.special_id(token) for token in end)]
    turn = turn_of(chat_format, [user("q"), CALL], sampled, tools=[BASH])
    tail = chat_format.tail_after(turn, [tool("a.txt")], thinking=True)
    assert text_of(chat_format, tail) == (f"{opening}\na.txt<|im_end|>\n<|im_start|>assistant\n")


def test_where_role_tokens_end_turns_the_tail_is_that_of_the_built_in_format():
    chat_format, built_in = template_format(ROLES), GlmFormat(small_tokenizer(), version="glm-5.2")
    answer = assistant("look", reasoning="why", calls=(call("bash", command="ls"),))
    for token in ("<|observation|>", "<|user|>", None):
        sampled = [5] if token is None else [5, stop(chat_format, token)]
        turn = turn_of(chat_format, [user("q"), answer], sampled, tools=[BASH])
        tail = chat_format.tail_after(turn, [tool("r"), tool("s")], thinking=True)
        ends = None if token is None else sampled[-1]
        assert tail == built_in.render_tail(
            [tool("r"), tool("s")], previous_stop_id=ends, thinking=True
        )


def refused(chat_format, messages, new, **options):
    turn = turn_of(chat_format, messages, [5, stop(chat_format)], **options)
    thinking = options.get("thinking", True)
    return chat_format.tail_after(turn, new, thinking=thinking) is None


def test_a_template_that_forgets_reasoning_continues_within_a_tool_loop_only():
    answer = assistant("look", reasoning="why", calls=(call("bash", command="ls"),))
    forgets = template_format(FORGETTING)
    assert not refused(forgets, [user("q"), answer], [tool("r")], tools=[BASH])
    assert refused(forgets, [user("q"), answer], [tool("r"), user("p")], tools=[BASH])
    assert refused(forgets, [user("q"), answer], [user("p")], tools=[BASH])
    assert not refused(template_format(GROWING), [user("q"), answer], [user("p")], tools=[BASH])


def test_a_prompt_that_the_history_does_not_hold_is_not_continued():
    # Without thinking the prompt ends in an empty block, which is gone once the answer is history.
    assert refused(
        template_format(FORGETTING), [user("q"), assistant("A")], [user("p")], thinking=False
    )


def test_a_template_that_moves_text_about_is_not_continued():
    assert refused(template_format(MOVING), [user("q"), assistant("A")], [user("p")])


def test_a_template_that_leaves_out_what_was_said_is_not_continued():
    silent = NO_TOOLS.replace("{{ m.content }}", "{{ m.content[:30] }}")
    assert refused(
        TemplateFormat(QWEN, compiled(silent)), [user("q"), assistant("long " * 9)], [user("p")]
    )


def test_that_a_turn_was_not_continued_is_said_once_and_counted(caplog):
    chat_format = TemplateFormat(QWEN, compiled(MOVING))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert refused(chat_format, [user("q"), assistant("A")], [user("p")])
    assert chat_format.rewrites.num == 3
    assert [r for r in caplog.messages if "changes what stood before" in r] == [
        chat_format.rewrites.explain()
    ]


# Masks


def test_without_marks_an_answer_is_what_follows_its_prompt_with_what_ends_it():
    messages = [system("s"), user("one"), assistant("A"), user("two"), CALL]
    text = trained(template_format(GROWING), messages, tools=[BASH])
    assert re.sub(r"\s", "", text) == (
        'A<|im_end|>look<tool_call>{"name":"bash","arguments":{"command":"ls"}}</tool_call><|im_end|>'
    )


def test_an_untrained_answer_trains_nothing():
    messages = [user("q"), assistant("bad"), user("no"), assistant("good")]
    assert trained(template_format(GROWING), messages, untrained={1}) == "good<|im_end|>"
    assert trained(template_format(MARKED), messages, untrained={1}) == "good<|im_end|>"


def test_marks_of_the_template_say_what_is_trained():
    messages = [user("q"), assistant("A"), user("p"), assistant("B")]
    assert trained(template_format(MARKED), messages) == "A<|im_end|>B<|im_end|>"


def test_what_ends_a_marked_answer_is_trained_even_outside_the_mark():
    outside = MARKED.replace(
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}",
        "{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert outside != MARKED
    assert trained(template_format(outside), [user("q"), assistant("A")]) == "A<|im_end|>"


def test_the_role_token_that_ends_a_turn_is_trained():
    messages = [user("q"), assistant("A", reasoning="R"), user("p"), assistant("B", reasoning="S")]
    assert trained(template_format(ROLES), messages) == "R</think>A<|user|>S</think>B<|user|>"
    call_last = [user("q"), assistant(reasoning="R", calls=(call("bash"),))]
    assert trained(template_format(ROLES), call_last, tools=[BASH]).endswith(
        "</tool_call><|observation|>"
    )


def test_a_prompt_without_thinking_is_what_history_and_prompt_have_in_common():
    messages = [user("q"), assistant("A"), user("p"), assistant("B")]
    text = trained(template_format(FORGETTING), messages, thinking=False)
    assert text == "A<|im_end|>B<|im_end|>"


def test_an_answer_that_cannot_be_found_again_is_an_error_and_not_left_out():
    with pytest.raises(ConfigError, match="does not show which tokens message 1"):
        trained(template_format(MOVING), [user("q"), assistant("A"), user("p"), assistant("B")])


# Reading


def test_reasoning_is_read_as_the_prompt_opened_it():
    opens = GROWING.replace(
        "'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif"
    )
    assert opens != GROWING
    ids = [
        *QWEN.encode("why"),
        QWEN.special_id("</think>"),
        *QWEN.encode("A"),
        stop(template_format(GROWING)),
    ]
    message = template_format(opens).parse(ids, thinking=True).message
    assert (message.reasoning, message.content) == ("why", "A")
    itself = [QWEN.special_id("<think>"), *ids]
    assert template_format(GROWING).parse(itself, thinking=True).message == message


def test_calls_are_read_as_the_template_writes_them():
    for source, said in (
        (GROWING, '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'),
        (
            ROLES,
            "</think><tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>",
        ),
    ):
        chat_format = template_format(source)
        ids = chat_format.tokenizer.encode_with_control(said)
        (one,) = chat_format.parse(ids, [BASH], thinking=True).message.tool_calls
        assert (one.name, one.arguments, one.error) == ("bash", {"command": "ls"}, None)


def test_a_vocabulary_without_tags_reads_calls_from_text():
    chat_format = template_format(GROWING, chatml_tokenizer())
    assert rendered(chat_format, [user("q")], tools=[BASH]).token_ids
