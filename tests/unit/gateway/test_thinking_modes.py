"""The three thinking modes of a session: preserved, interleaved, and off for a turn."""

from fakes import FakeEngine
from longarc.gateway.core import Gateway
from longarc.gateway.session import GatewaySession
from longarc.gateway.turn_options import TurnOptions
from longarc.records.sampling import Sampling
from longarc.tokens.glm import GlmFormat
from token_samples import BASH, assistant, sampled, small_tokenizer, text_of, tool, user

FORMAT = GlmFormat(small_tokenizer())
LOOK = sampled("look</think><tool_call>bash</tool_call><|observation|>")
DONE = sampled("seen</think>the word<|user|>")
THANKS = sampled("kind</think>you are welcome<|user|>")


def opened(
    engine: FakeEngine, *, clear_thinking: bool = False, thinking: bool = True
) -> GatewaySession:
    return Gateway(engine, FORMAT, clear_thinking=clear_thinking).open(
        "s", sampling=Sampling(max_new_tokens=99), thinking=thinking, max_context_tokens=4096
    )


async def test_a_rewritten_history_keeps_its_reasoning_when_thinking_is_preserved():
    engine = FakeEngine([DONE])
    history = [user("q"), assistant("A", reasoning="why"), user("p")]
    await opened(engine).chat(history)
    assert "<think>why</think>A" in text_of(engine.requests[0].prompt_ids)


async def test_a_turn_may_go_without_thinking_in_the_same_segment():
    engine = FakeEngine([DONE, sampled("at once<|user|>")])
    session = opened(engine)
    first = await session.answer([user("q")])
    history = [user("q"), first.turn.message, user("quick!")]
    second = await session.answer(history, options=TurnOptions(thinking=False))
    assert text_of(engine.requests[1].prompt_ids).endswith("quick!<|assistant|></think>")
    assert (second.turn.message.reasoning, second.turn.message.content) == (None, "at once")
    assert len(session.segments()) == 1


async def test_interleaved_thinking_forgets_reasoning_at_a_user_message_and_opens_a_segment():
    engine = FakeEngine([LOOK, DONE, THANKS, DONE])
    session = opened(engine, clear_thinking=True)
    history = [user("q")]
    for reply in (tool("x"), user("thanks"), tool("odd")):
        answer = await session.chat(history, tools=[BASH])
        history = [*history, answer.message, reply]
    await session.chat(history, tools=[BASH])

    first, second = session.segments()
    assert text_of(first.token_ids).count("<think>") == 2
    assert "look</think>" not in text_of(second.token_ids)
    assert "kind</think>" in text_of(second.token_ids), "a tool's answer clears nothing"
    assert second.num_trained_tokens == len(THANKS) + len(DONE)
    assert engine.requests[3].prompt_ids[: len(engine.requests[2].prompt_ids)] == (
        engine.requests[2].prompt_ids
    )


async def test_interleaved_thinking_without_reasoning_keeps_the_ids():
    engine = FakeEngine([sampled("A<|user|>"), sampled("B<|user|>")])
    session = opened(engine, clear_thinking=True, thinking=False)
    first = await session.chat([user("q")])
    await session.chat([user("q"), first.message, user("p")])
    assert len(session.segments()) == 1
