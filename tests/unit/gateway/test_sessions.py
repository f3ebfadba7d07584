"""Token-in-token-out: what the engine gets extends what it sampled, whatever the client does."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from fakes import FakeEngine
from longarc.errors import ConfigError, ContractError, EngineError, ResourceError
from longarc.gateway.core import Gateway
from longarc.gateway.session import GatewaySession
from longarc.gateway.session_settings import SessionClosed
from longarc.gateway.turn_log import decode_turn
from longarc.gateway.turn_options import TurnOptions
from longarc.records.ports import ContextExhausted, PolicySession, SessionFactory
from longarc.records.sampling import Sampling
from longarc.records.segment import NOT_SAMPLED
from longarc.tokens.glm import GlmFormat
from token_samples import (
    BASH,
    assistant,
    call,
    sampled,
    small_tokenizer,
    system,
    text_of,
    tool,
    user,
)

FORMAT = GlmFormat(small_tokenizer())
SAMPLING = Sampling(max_new_tokens=200)

LOOK = sampled(
    "look</think><tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
    "<|observation|>"
)
DONE = sampled("seen</think>the word<|user|>")
THANKS = sampled("kind</think>you are welcome<|user|>")


def opened(
    engine: FakeEngine, *, gateway: Gateway | None = None, **options: object
) -> GatewaySession:
    factory: SessionFactory = gateway or Gateway(engine, FORMAT)
    settings = {"sampling": SAMPLING, "thinking": True, "max_context_tokens": 4096} | options
    session: PolicySession = factory.open("s", **settings)
    assert isinstance(session, GatewaySession)
    return session


async def test_the_next_prompt_begins_with_the_ids_that_were_sampled_not_with_their_re_encoding():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine)
    opening = [system("be brief"), user("find it")]

    first = await session.chat(opening, tools=[BASH])
    history = [*opening, first.message, tool("a.txt", call_id=first.message.tool_calls[0].id)]
    second = await session.chat(history, tools=[BASH])

    stored = engine.requests[0].prompt_ids + tuple(LOOK)
    assert engine.requests[1].prompt_ids[: len(stored)] == stored
    assert text_of(engine.requests[1].prompt_ids[len(stored) :]) == (
        "<tool_response>a.txt</tool_response><|assistant|><think>"
    )
    rendered = FORMAT.render(
        history, [BASH], thinking=True, clear_thinking=False, add_generation_prompt=True
    )
    assert text_of(rendered.token_ids) == text_of(engine.requests[1].prompt_ids)
    assert rendered.token_ids != engine.requests[1].prompt_ids, "the script must not be canonical"
    assert first.finish_reason == "tool_calls"
    assert second.finish_reason == "stop"
    assert second.message.content == "the word"
    assert second.num_prompt_tokens == len(engine.requests[1].prompt_ids)
    assert second.num_sampled_tokens == len(DONE)


async def test_a_conversation_that_only_grew_is_one_segment_that_trains_exactly_what_was_sampled():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine)
    first = await session.chat([user("find it")], tools=[BASH])
    await session.chat([user("find it"), first.message, tool("a.txt")], tools=[BASH])

    (segment,) = session.segments()
    prompt, tail = engine.requests[0].prompt_ids, engine.requests[1].prompt_ids
    assert segment.token_ids == tail + tuple(DONE)
    num_tail = len(tail) - len(prompt) - len(LOOK)
    mask = [False] * len(prompt) + [True] * len(LOOK) + [False] * num_tail + [True] * len(DONE)
    assert list(segment.is_sampled) == mask
    assert list(segment.train_mask) == mask
    assert segment.token_ids[len(prompt) + len(LOOK) - 1] == small_tokenizer().special_id(
        "<|observation|>"
    ), "the role token that ended the turn is trained"
    assert [lp for lp, m in zip(segment.behaviour_logprobs, mask, strict=True) if m] == [
        -(i + 1) / 8 for i in range(len(LOOK))
    ] + [-(i + 1) / 8 for i in range(len(DONE))]
    assert {lp for lp, m in zip(segment.behaviour_logprobs, mask, strict=True) if not m} == {0.0}
    assert (segment.order, segment.parent) == (0, None)


async def test_segments_say_what_each_token_was_drawn_from():
    engine = FakeEngine([LOOK, DONE])
    sampling = Sampling(max_new_tokens=99, top_k=2, returns_kept_ids=True)
    session = opened(engine, sampling=sampling)
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), first.message, tool("x")], tools=[BASH])
    (segment,) = session.segments()
    expected = [
        (i, i + 1) if is_sampled else ()
        for i, is_sampled in zip(segment.token_ids, segment.is_sampled, strict=True)
    ]
    assert segment.kept_ids == tuple(expected)


async def test_a_session_that_keeps_the_whole_vocabulary_records_nothing():
    session = opened(
        FakeEngine([DONE]), sampling=Sampling(max_new_tokens=99, returns_kept_ids=True)
    )
    await session.chat([user("q")])
    assert session.segments()[0].kept_ids is None


async def test_branches_share_a_prefix_and_train_it_once():
    engine = FakeEngine([LOOK, DONE, THANKS])
    session = opened(engine)
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), first.message, tool("one")], tools=[BASH])
    await session.chat([user("q"), first.message, tool("two")], tools=[BASH])

    one, two = session.segments()
    assert (two.order, two.parent) == (1, 0)
    assert one.num_trained_tokens == len(LOOK) + len(DONE)
    assert two.num_trained_tokens == len(THANKS)
    assert sum(two.is_sampled) == len(LOOK) + len(THANKS)
    assert two.token_ids == engine.requests[2].prompt_ids + tuple(THANKS)


async def test_an_edited_answer_becomes_untrained_context_on_a_branch_with_its_real_prompt():
    engine = FakeEngine([LOOK, DONE, THANKS])
    session = opened(engine)
    first = await session.chat([user("q")], tools=[BASH])
    history = [user("q"), first.message, tool("one")]
    await session.chat(history, tools=[BASH])
    edited = assistant("another word")
    await session.chat([*history, edited, user("thanks")], tools=[BASH])

    prompt = engine.requests[2].prompt_ids
    assert text_of(prompt).endswith(
        "<tool_response>one</tool_response><|assistant|></think>another word<|user|>thanks"
        "<|assistant|><think>"
    )
    original, branch = session.segments()
    assert original.num_trained_tokens == len(LOOK) + len(DONE)
    assert branch.token_ids == prompt + tuple(THANKS)
    assert branch.num_trained_tokens == len(THANKS)
    assert branch.parent == 0


async def test_a_rewritten_history_opens_a_segment_with_the_prompt_that_the_engine_saw():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine)
    await session.chat([user("a long story")], tools=[BASH])
    await session.chat([user("a summary")], tools=[BASH])

    first, second = session.segments()
    assert second.token_ids == engine.requests[1].prompt_ids + tuple(DONE)
    assert "a long story" not in text_of(second.token_ids)
    assert (second.order, second.parent) == (1, 0)
    assert first.num_trained_tokens == len(LOOK)


async def test_a_history_of_the_same_length_with_another_beginning_is_another_history():
    engine = FakeEngine([LOOK, DONE, THANKS])
    session = opened(engine)
    first = await session.chat([user("one question")], tools=[BASH])
    for question in ("one question", "another question"):
        await session.chat([user(question), first.message, tool("x")], tools=[BASH])
    assert "another question" in text_of(engine.requests[2].prompt_ids)
    assert len(session.segments()) == 2


async def test_other_tools_mean_another_prompt():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine)
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), first.message, tool("x")])
    assert "# Tools" not in text_of(engine.requests[1].prompt_ids)
    assert len(session.segments()) == 2


async def test_tool_choice_none_keeps_the_prompt_and_leaves_calls_out_of_the_answer():
    engine = FakeEngine([LOOK, LOOK, DONE])
    session = opened(engine)
    first = await session.chat([user("q")], tools=[BASH])
    history = [user("q"), first.message, tool("x")]
    answer = await session.answer(history, tools=[BASH], options=TurnOptions(tool_choice="none"))
    assert answer.turn.message.tool_calls == ()
    assert answer.turn.finish_reason == "stop"
    await session.chat([*history, answer.turn.message, user("go on")], tools=[BASH])
    assert len(session.segments()) == 1


@pytest.mark.parametrize(
    "echo",
    [
        lambda m: replace(m, reasoning=None),
        lambda m: replace(m, tool_calls=(replace(m.tool_calls[0], id="toolu_x"),)),
        lambda m: replace(
            m, tool_calls=(replace(m.tool_calls[0], arguments=dict([*m.tool_calls[0].arguments.items()][::-1])),)
        ),
        lambda m: replace(
            m, tool_calls=(replace(m.tool_calls[0], arguments={"command": "ls", "timeout": 3.0}),)
        ),
    ],
    ids=["reasoning left out", "other call ids", "other key order", "3.0 for 3"],
)  # fmt: skip
async def test_an_echo_in_other_words_for_the_same_thing_still_continues_the_sampled_ids(echo):
    look = sampled(
        "look</think><tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value>"
        "<arg_key>timeout</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
    )
    engine = FakeEngine([look, DONE])
    session = opened(engine)
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), echo(first.message), tool("x")], tools=[BASH])
    assert len(session.segments()) == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: replace(m, content=m.content + " "),
        lambda m: replace(m, reasoning="something else"),
        lambda m: replace(m, tool_calls=()),
        lambda m: replace(m, tool_calls=(call("bash", command="ls "),)),
    ],
    ids=["a blank more", "other reasoning", "call removed", "argument changed"],
)
async def test_an_echo_that_says_something_else_branches(edit):
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine)
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), edit(first.message), tool("x")], tools=[BASH])
    assert len(session.segments()) == 2
    stored = engine.requests[0].prompt_ids + tuple(LOOK)
    assert engine.requests[1].prompt_ids[: len(stored)] != stored


async def test_equal_answers_to_one_prompt_are_told_apart_by_their_call_ids():
    by_letters = sampled("the") + LOOK[4:]
    merged = small_tokenizer().encode("the") + LOOK[4:]
    assert merged != by_letters
    engine = FakeEngine([by_letters, merged, DONE])
    session = opened(engine)
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), first.message, tool("x")], tools=[BASH])
    stored = engine.requests[0].prompt_ids + tuple(by_letters)
    assert engine.requests[2].prompt_ids[: len(stored)] == stored


async def test_an_answer_sent_back_with_1_for_true_is_another_answer():
    flagged = sampled(
        "look</think><tool_call>bash<arg_key>all</arg_key><arg_value>true</arg_value></tool_call>"
        "<|observation|>"
    )
    session = opened(FakeEngine([flagged, DONE]))
    first = (await session.chat([user("q")], tools=[BASH])).message
    (call_made,) = first.tool_calls
    altered = replace(first, tool_calls=(replace(call_made, arguments={"all": 1}),))
    assert altered == first, "the two must be equal in Python"
    await session.chat([user("q"), altered, tool("x")], tools=[BASH])
    assert len(session.segments()) == 2


async def test_sessions_with_tools_that_are_equal_but_spelt_apart_keep_keys_of_their_own():
    keys = []
    gateway = Gateway(FakeEngine([DONE, DONE, DONE]), FORMAT)
    for default in (True, 1, True):
        extended = replace(BASH, parameters={**BASH.parameters, "default": default})
        session = opened(gateway.engine, gateway=gateway)
        await session.chat([user("q")], tools=[extended])
        keys.append(decode_turn(session.payloads()[0]).key)
        await session.close()
    assert keys[0] == keys[2] != keys[1]


async def test_tokens_keep_the_version_that_sampled_them_when_weights_change_in_flight():
    engine = FakeEngine([DONE], version_of_piece=lambda _, piece: 3 if piece < 2 else 4)
    session = opened(engine)
    await session.chat([user("q")])
    (segment,) = session.segments()
    versions = [v for v in segment.policy_versions if v != NOT_SAMPLED]
    assert versions == [3] * 4 + [4] * (len(DONE) - 4)
    assert segment.lag(trainer_version=5) == 2


async def test_a_turn_that_was_cut_off_is_closed_by_the_next_message():
    engine = FakeEngine([sampled("thinking on and on and on"), DONE])
    session = opened(engine)
    first = await session.chat([user("q")], max_new_tokens=10)
    assert first.finish_reason == "length"
    assert first.message.reasoning == "thinking o"
    await session.chat([user("q"), first.message, user("so?")])
    assert text_of(engine.requests[1].prompt_ids).endswith(
        "<think>thinking o<|user|>so?<|assistant|><think>"
    )
    assert len(session.segments()) == 1


async def test_the_budget_is_what_fits_the_context():
    engine = FakeEngine([DONE, DONE])
    session = opened(engine)
    await session.chat([user("q")])
    num_prompt = len(engine.requests[0].prompt_ids)

    tight = opened(engine, max_context_tokens=num_prompt + 20)
    await tight.chat([user("q")])
    assert engine.requests[1].sampling.max_new_tokens == 20


async def test_a_turn_without_room_exhausts_the_context_and_records_nothing():
    engine = FakeEngine([])
    session = opened(engine, max_context_tokens=20)
    with pytest.raises(ContextExhausted, match=r"prompt has \d+ of 20 tokens"):
        await session.chat([user("a question that does not fit")])
    assert session.segments() == ()
    assert engine.requests == []


async def test_a_turn_that_the_log_did_not_take_is_sampled_again_with_the_same_seed_and_call_ids():
    failures = [True]

    def full_once(session_id: str, index: int, payload: bytes) -> None:
        if failures and failures.pop():
            raise ResourceError("the disk is full")

    engine = FakeEngine([LOOK, LOOK])
    gateway = Gateway(engine, FORMAT, turn_log=full_once)
    session = opened(engine, gateway=gateway, sampling=Sampling(max_new_tokens=99, seed=7))
    with pytest.raises(ResourceError, match="disk is full"):
        await session.chat([user("q")], tools=[BASH])
    again = await session.answer([user("q")], tools=[BASH])
    first, second = (request.sampling.seed for request in engine.requests)
    assert first is not None
    assert first == second
    assert again.node.serial == 0

    undisturbed = opened(FakeEngine([LOOK]), sampling=Sampling(max_new_tokens=99, seed=7))
    alone = await undisturbed.answer([user("q")], tools=[BASH])
    assert again.turn.message == alone.turn.message
    assert session.payloads() == undisturbed.payloads()


async def test_stop_ids_of_the_format_are_asked_for_and_seeds_differ_by_turn():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine, sampling=Sampling(max_new_tokens=99, stop_ids=(5,), seed=7))
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), first.message, tool("x")], tools=[BASH])
    one, two = (request.sampling for request in engine.requests)
    assert set(one.stop_ids) == {5, *FORMAT.stop_ids}
    assert None not in (one.seed, two.seed)
    assert one.seed != two.seed


@pytest.mark.parametrize("top_k", [0, 2])
async def test_a_session_restored_from_its_log_is_byte_identical_and_goes_on(top_k):
    sampling = Sampling(max_new_tokens=200, seed=1, top_k=top_k, returns_kept_ids=True)
    log: list[bytes] = []
    engine = FakeEngine([LOOK, DONE, THANKS], version_of_piece=lambda r, p: r + p)
    gateway = Gateway(engine, FORMAT, turn_log=lambda _, i, payload: log.insert(i, payload))
    session = opened(engine, gateway=gateway, sampling=sampling)
    first = await session.chat([user("q")], tools=[BASH])
    history = [user("q"), first.message, tool("one")]
    second = await session.chat(history, tools=[BASH])
    last = [*history, second.message, user("thanks")]
    assert tuple(log) == session.payloads()

    resumed = FakeEngine([THANKS], version_of_piece=lambda r, p: 2 + p)
    restored = Gateway(resumed, FORMAT).restore(
        "s",
        log,
        sampling=sampling,
        thinking=True,
        max_context_tokens=4096,
    )
    assert restored.payloads() == session.payloads()
    assert restored.segments() == session.segments()
    await session.chat(last, tools=[BASH])
    await restored.chat(last, tools=[BASH])
    assert resumed.requests[0] == engine.requests[2]
    assert restored.payloads() == session.payloads()


async def test_a_damaged_log_is_refused():
    session = opened(FakeEngine([LOOK, DONE]))
    first = await session.chat([user("q")], tools=[BASH])
    await session.chat([user("q"), first.message, tool("x")], tools=[BASH])
    one, two = session.payloads()
    options = {"sampling": SAMPLING, "thinking": True, "max_context_tokens": 4096}
    gateway = Gateway(FakeEngine([]), FORMAT)
    for log, match in [
        ([two], "cannot follow 0 turns"),
        ([one[:-9]], "damaged"),
        ([one.replace(b'"format":1', b'"format":9')], "format 9"),
        ([one.replace(b'"context_ids":[', b'"context_ids":[7,')], "not those that the engine saw"),
        ([b"{}"], "damaged"),
    ]:
        with pytest.raises(ContractError, match=match):
            gateway.restore("s", log, **options)
    assert gateway.num_open_sessions == 0
    gateway.restore("s", [one, two], **options)


async def test_the_log_is_written_before_the_answer_and_a_failing_log_means_no_turn():
    def full_disk(session_id: str, index: int, payload: bytes) -> None:
        raise OSError("no space left on device")

    engine = FakeEngine([LOOK])
    session = opened(engine, gateway=Gateway(engine, FORMAT, turn_log=full_disk))
    with pytest.raises(OSError, match="no space"):
        await session.chat([user("q")])
    assert session.segments() == ()


async def test_an_engine_failure_records_nothing_and_the_same_call_can_be_made_again():
    def fail_once(request: int, piece: int) -> None:
        if (request, piece) == (0, 1):
            raise EngineError("the engine lost its process")

    engine = FakeEngine([LOOK, LOOK], before_piece=fail_once)
    session = opened(engine)
    with pytest.raises(EngineError, match="lost its process"):
        await session.chat([user("q")])
    assert session.segments() == ()
    await session.chat([user("q")])
    assert len(session.segments()) == 1


async def test_a_closed_session_refuses_calls_and_keeps_its_segments():
    engine = FakeEngine([LOOK])
    gateway = Gateway(engine, FORMAT)
    session = opened(engine, gateway=gateway)
    await session.chat([user("q")])
    await session.close()
    await session.close()
    with pytest.raises(SessionClosed, match="s is closed"):
        await session.chat([user("q")])
    with pytest.raises(SessionClosed, match="'s' is closed or was never opened"):
        gateway.session("s")
    assert len(session.segments()) == 1
    opened(engine, gateway=gateway)


async def test_closing_cancels_a_request_in_flight():
    engine = FakeEngine([DONE])
    session = opened(engine)

    def close(_: int, piece: int) -> None:
        if piece == 1:
            with suppress(StopIteration):
                session.close().send(None)

    engine.before_piece = close
    with pytest.raises(SessionClosed):
        await session.chat([user("q")])
    assert engine.num_cancelled == 1
    assert session.segments() == ()


async def test_wrong_use_is_told_apart_from_a_rollout_that_failed():
    gateway = Gateway(FakeEngine([]), FORMAT)
    session = opened(FakeEngine([]), gateway=gateway)
    with pytest.raises(ContractError, match="already open"):
        opened(FakeEngine([]), gateway=gateway)
    with pytest.raises(ConfigError, match="no room for a prompt"):
        gateway.open("t", sampling=SAMPLING, thinking=True, max_context_tokens=8)
    with pytest.raises(ConfigError, match="at least one message"):
        await session.chat([])
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        await session.chat([user("q")], max_new_tokens=0)


async def test_parallel_calls_of_one_session_are_recorded_as_they_end():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine)
    await asyncio.gather(session.chat([user("a")]), session.chat([user("b")]))
    assert [s.order for s in session.segments()] == [0, 1]


async def test_a_retry_gets_the_answer_that_was_lost_and_a_new_question_does_not():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine)
    first = await session.answer([user("q")], tools=[BASH], options=TurnOptions(is_retry=True))
    again = await session.answer([user("q")], tools=[BASH], options=TurnOptions(is_retry=True))
    assert again == first
    history = [user("q"), first.turn.message, tool("x")]
    await session.answer(history, tools=[BASH], options=TurnOptions(is_retry=True))
    assert len(engine.requests) == 2


async def test_the_same_question_without_a_retry_is_another_sample():
    engine = FakeEngine([LOOK, DONE])
    session = opened(engine, sampling=Sampling(max_new_tokens=99, seed=1))
    await session.chat([user("q")])
    await session.chat([user("q")])
    assert len(session.segments()) == 2
    assert engine.requests[0].sampling.seed != engine.requests[1].sampling.seed


async def test_restoring_a_session_that_has_turns_is_refused():
    session = opened(FakeEngine([LOOK]))
    await session.chat([user("q")])
    with pytest.raises(ContractError, match="already has 1 turns"):
        session.restore(session.payloads())


async def test_arguments_beyond_64_bits_survive_the_log():
    big = sampled(
        "</think><tool_call>f<arg_key>n</arg_key><arg_value>123456789012345678901234567890</arg_value>"
        '<arg_key>a</arg_key><arg_value>[1.5, [2.0], {"k": null}]</arg_value></tool_call><|observation|>'
    )
    session = opened(FakeEngine([big, DONE]))
    first = await session.chat([user("q")])
    assert first.message.tool_calls[0].arguments["n"] == 123456789012345678901234567890
    await session.chat([user("q"), first.message, tool("x")])
    restored = Gateway(FakeEngine([]), FORMAT).restore(
        "s", session.payloads(), sampling=SAMPLING, thinking=True, max_context_tokens=4096
    )
    assert restored.segments() == session.segments()
    assert len(restored.segments()) == 1
