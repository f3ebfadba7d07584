"""Agents, windows, summaries and side requests: from headers, and from nothing but the prompts."""

from dataclasses import replace

import pytest

from fakes import FakeEngine
from longarc.errors import ConfigError
from longarc.gateway.asked import RecognitionRules
from longarc.gateway.core import Gateway
from longarc.gateway.lineage import read_lineage
from longarc.gateway.session import GatewaySession
from longarc.gateway.turn_options import TurnOptions
from longarc.records.lineage import Lineage
from longarc.records.message import Message, ToolSpec
from longarc.records.sampling import Sampling
from longarc.records.segment import Segment, SegmentKind
from longarc.tokens.glm import GlmFormat
from token_samples import BASH, WEATHER, sampled, small_tokenizer, system, tool, user

FORMAT = GlmFormat(small_tokenizer())
OPTIONS = {
    "sampling": Sampling(max_new_tokens=400),
    "thinking": False,
    "max_context_tokens": 1 << 16,
}
CALL = (
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
SUMMARY = "The word is in the second archive, and the first one was empty when I looked at it."
EXEC, SUM, SIDE = SegmentKind.EXEC, SegmentKind.SUMMARY, SegmentKind.SIDE


class Client:
    """A black-box agent program: owns its contexts, sends whatever headers it is told to."""

    def __init__(self, *answers: str, rules: RecognitionRules | None = None) -> None:
        self.engine = FakeEngine(
            [sampled(a if a.endswith("|>") else f"{a}<|user|>") for a in answers]
        )
        gateway = Gateway(self.engine, FORMAT, rules=rules)
        self.session: GatewaySession = gateway.open("s", **OPTIONS)

    async def ask(
        self,
        messages: list[Message],
        tools: tuple[ToolSpec, ...] = (BASH,),
        *,
        limit: int | None = None,
        **lineage: object,
    ) -> list[Message]:
        options = TurnOptions(lineage=Lineage(**lineage), max_new_tokens=limit)
        answer = await self.session.answer(messages, tools=tools, options=options)
        return [*messages, answer.turn.message]

    def segments(self) -> tuple[Segment, ...]:
        """The segments, which a restored session has as well."""
        restored = Gateway(FakeEngine([]), FORMAT).restore("r", self.session.payloads(), **OPTIONS)
        assert restored.payloads() == self.session.payloads()
        assert restored.turns() == self.session.turns()
        assert restored.segments() == self.session.segments()
        return self.session.segments()


def story(segments: tuple[Segment, ...]) -> list[tuple[object, ...]]:
    return [(s.kind, s.agent_id, s.window, s.parent) for s in segments]


async def test_a_compaction_is_work_then_its_summary_then_the_next_window():
    client = Client(CALL, SUMMARY, "done")
    history = await client.ask([system("sys"), user("find it")])
    history = [*history, tool("a")]
    await client.ask(
        [*history, user("Your task is to create a detailed summary of the conversation so far.")]
    )
    await client.ask(
        [system("sys"), user(f"This session is continued. Summary:\n{SUMMARY}\nGo on.")]
    )

    segments = client.segments()
    assert story(segments) == [(EXEC, "main", 0, None), (SUM, "main", 0, 0), (EXEC, "main", 1, 1)]
    work, summary, window = segments
    assert work.num_trained_tokens == len(sampled(CALL))
    assert summary.num_trained_tokens == len(sampled(f"{SUMMARY}<|user|>"))
    assert summary.token_ids[: len(work.token_ids)] == work.token_ids, "the summary saw the work"
    assert window.num_trained_tokens == len(sampled("done<|user|>"))


async def test_a_summary_asked_for_in_unknown_words_is_known_by_the_window_that_opens_with_it():
    client = Client(CALL, SUMMARY, "done")
    history = await client.ask([system("sys"), user("find it")])
    history = await client.ask([*history, tool("a"), user("Fasse zusammen.")])
    assert client.segments()[-1].kind is EXEC, "so far it is an answer like any other"
    await client.ask([system("sys"), user(f"Bisher: {'  '.join(SUMMARY.split(' '))}\nWeiter.")])
    assert story(client.segments()) == [
        (EXEC, "main", 0, None),
        (SUM, "main", 0, 0),
        (EXEC, "main", 1, 1),
    ]


async def test_only_what_stands_between_summary_tags_has_to_come_back():
    client = Client(f"<analysis>long thoughts</analysis><summary>{SUMMARY}</summary>", "done")
    await client.ask([system("sys"), user("find it, then tell all")])
    await client.ask([system("sys"), user(f"Summary: {SUMMARY}")])
    assert story(client.segments()) == [(SUM, "main", 0, None), (EXEC, "main", 1, 0)]


async def test_a_summariser_with_a_prompt_of_its_own_is_a_summary_of_the_agent_whose_answers_it_holds():
    client = Client(CALL, SUMMARY, "done")
    history = await client.ask([system("sys"), user("find it")])
    told = [system("You are tasked with summarizing conversations."), *history[1:], tool("a")]
    await client.ask([*told, user("now")], tools=())
    await client.ask([system("sys"), user(f"Summary: {SUMMARY}")])
    assert story(client.segments()) == [
        (EXEC, "main", 0, None),
        (SUM, "main", 0, 0),
        (EXEC, "main", 1, 1),
    ]


async def test_a_history_without_its_old_observations_is_the_next_window_of_its_agent():
    client = Client(CALL, CALL, "done")
    history = await client.ask([system("sys"), user("find it")])
    history = await client.ask([*history, tool("first output")])
    folded = [tool("folded") if m.content == "first output" else m for m in history]
    await client.ask([*folded, tool("second output")])
    assert story(client.segments()) == [(EXEC, "main", 0, None), (EXEC, "main", 0, 0)]
    rewritten = Client(CALL, "done")
    history = await rewritten.ask([system("sys"), user("a very long task")])
    await rewritten.ask([system("sys"), user("short task"), *history[2:], tool("x")])
    assert story(rewritten.segments()) == [(EXEC, "main", 0, None), (EXEC, "main", 1, 0)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("messages", "limit"),
    [
        ([system("You are a title generator. Be brief."), user("find it")], None),
        ([user("quota")], 1),
        ([system("Say what this is about."), user("find it")], None),
    ],
    ids=["title", "probe", "without tools"],
)
async def test_side_requests_are_never_trained_whenever_they_come(messages, limit, is_first):
    client = Client("Title", CALL, "done") if is_first else Client(CALL, "Title", "done")
    work = [system("sys"), user("find it")]
    if is_first:
        await client.ask(messages, (), limit=limit)
        history = await client.ask(work)
    else:
        history = await client.ask(work)
        await client.ask(messages, (), limit=limit)
    await client.ask([*history, tool("x")])
    side = [s for s in client.segments() if s.kind is SIDE]
    (main,) = (s for s in client.segments() if s.kind is EXEC)
    assert [s.num_trained_tokens for s in side] == [0]
    assert any(side[0].is_sampled)
    assert (main.agent_id, main.window) == ("main", 0)
    assert main.num_trained_tokens == len(sampled(CALL)) + len(sampled("done<|user|>"))


async def test_a_title_that_a_later_window_quotes_stays_beside_the_work():
    title = "How the word was found in the second archive"
    client = Client(CALL, title, "done")
    await client.ask([system("sys"), user("find it")])
    await client.ask([system("You are a title generator."), user("find it")], ())
    await client.ask([system("sys"), user(f"Continue «{title}».")])
    assert story(client.segments()) == [
        (EXEC, "main", 0, None),
        (SIDE, "main", 0, 0),
        (EXEC, "main", 1, 0),
    ]


async def test_a_chat_without_tools_is_work_where_nobody_has_tools():
    client = Client("one", "two")
    history = await client.ask([user("a")], ())
    await client.ask([*history, user("b")], ())
    assert story(client.segments()) == [(EXEC, "main", 0, None)]


async def test_the_rules_can_be_changed():
    rules = RecognitionRules(toolless_is_side=False, side_phrases=("name the dish",))
    client = Client(CALL, "a plan", "Soup", rules=rules)
    await client.ask([system("sys"), user("find it")])
    await client.ask([system("You plan."), user("find it")], ())
    await client.ask([user("Name  the dish")], ())
    assert [s.kind for s in client.session.segments()] == [EXEC, EXEC, SIDE]


async def test_a_sub_agent_without_headers_is_an_agent_of_its_own_below_who_spoke_before():
    client = Client(CALL, "sunny", "done")
    history = await client.ask([system("sys"), user("find it")])
    await client.ask([system("You know the weather."), user("how is it?")], (WEATHER,))
    await client.ask([*history, tool("sunny")])
    main, sub = client.segments()
    assert story((main, sub)) == [(EXEC, "main", 0, None), (EXEC, "agent-1", 0, 0)]
    assert (main.parent_agent_id, sub.parent_agent_id) == (None, "main")
    assert main.num_trained_tokens == len(sampled(CALL)) + len(sampled("done<|user|>"))


async def test_claude_code_names_its_sub_agents_and_two_of_one_kind_stay_apart():
    client = Client(CALL, "one", "two", "more", "done")
    history = await client.ask([system("sys"), user("find it")])
    sub = [system("You search."), user("look")]
    await client.ask(sub, agent_id="a1")
    second = await client.ask(sub, agent_id="a2", parent_agent_id="a1")
    await client.ask([*second, user("go on")], agent_id="a2", parent_agent_id="a1")
    await client.ask([*history, tool("x")])
    found = [(s.agent_id, s.parent_agent_id, s.parent) for s in client.segments()]
    assert found == [("main", None, None), ("a1", "main", 0), ("a2", "a1", 1)]


async def test_codex_counts_its_windows_and_names_threads():
    client = Client(CALL, SUMMARY, "helps", "done")
    history = await client.ask([system("sys"), user("q")], thread_id="t0", window=0)
    asked = [*history, tool("x"), user("You are performing a CONTEXT CHECKPOINT COMPACTION.")]
    await client.ask(asked, thread_id="t0", window=0)
    await client.ask([system("other"), user("help")], thread_id="t1", window=0)
    await client.ask([system("sys"), user(f"q\n{SUMMARY}")], thread_id="t0", window=1)
    assert story(client.segments()) == [
        (EXEC, "main", 0, None),
        (SUM, "main", 0, 0),
        (EXEC, "t1", 0, 1),
        (EXEC, "main", 1, 1),
    ]


async def test_a_client_may_say_it_all():
    client = Client("plan", "side", "sum", "done")
    await client.ask([user("a")], (), agent_id="planner")
    await client.ask([user("b")], (), agent_id="planner", kind=SIDE)
    await client.ask([user("c")], (), agent_id="planner", kind=SUM)
    await client.ask([user("d")], (), agent_id="coder", window=7)
    assert story(client.segments()) == [
        (EXEC, "planner", 0, None),
        (SIDE, "planner", 0, 0),
        (SUM, "planner", 0, 0),
        (EXEC, "coder", 7, 2),
    ]


async def test_turns_tell_what_was_said_and_where_its_tokens_are():
    client = Client(CALL, "done")
    history = await client.ask([system("sys"), user("find it")])
    await client.ask([*history, tool("x")])
    first, second = client.session.turns()
    assert [m.content for m in first.said] == ["sys", "find it"]
    assert [m.content for m in second.said] == ["x"]
    assert (first.parent, second.parent) == (None, 0)
    (segment,) = client.segments()
    for turn, ids in ((first, sampled(CALL)), (second, sampled("done<|user|>"))):
        assert turn.segment_order == 0
        assert list(segment.token_ids[turn.start : turn.start + turn.num_sampled]) == ids


async def test_a_session_without_lineage_recognises_nothing_and_keeps_nothing():
    client = Client("Title", "one")
    title = [system("You are a title generator."), user("x")]
    await client.session.chat(title)
    await client.session.chat([user("b")], tools=[BASH])
    assert story(client.segments()) == [(EXEC, "main", 0, None), (EXEC, "main", 0, 0)]
    assert client.session.turns() == ()
    assert all(b'"asked"' not in payload for payload in client.session.payloads())


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Lineage()),
        (
            {"x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "b"},
            Lineage(agent_id="a", parent_agent_id="b"),
        ),
        ({"x-codex-window-id": "s-1:12", "thread-id": "t"}, Lineage(window=12, thread_id="t")),
        ({"x-codex-window-id": "what"}, Lineage()),
        (
            {"x-session-id": "o", "x-parent-session-id": "p"},
            Lineage(thread_id="o", parent_thread_id="p"),
        ),
        (
            {
                "x-longarc-agent-id": "me",
                "x-claude-code-agent-id": "a",
                "x-longarc-window": "3",
                "x-longarc-kind": "summary",
            },
            Lineage(agent_id="me", window=3, kind=SUM),
        ),
        ({"x-claude-code-agent-id": "y" * 500}, Lineage(agent_id="y" * 128)),
    ],
)
def test_headers_of_known_clients_are_read(headers, expected):
    assert read_lineage(headers) == expected


@pytest.mark.parametrize(
    "headers",
    [{"x-longarc-window": "-1"}, {"x-longarc-window": "²"}, {"x-longarc-kind": "work"}],
)
def test_own_headers_that_mean_nothing_are_refused(headers):
    with pytest.raises(ConfigError, match="x-longarc"):
        read_lineage(headers)


async def test_a_billing_header_is_seen_by_nobody():
    client = Client(CALL, "done")
    bill = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;"
    history = await client.ask([system(bill.format("1ec")), system("sys"), user("q")])
    history = [system(bill.format("ab2")), *history[1:]]
    await client.ask([*history, tool("x")])
    assert len(client.segments()) == 1
    together = Client(CALL, "done")
    opening = [system(bill.format("1ec") + "\n\nsys"), user("q")]
    history = await together.ask(opening)
    history = [replace(history[0], content=bill.format("0") + "\nsys"), *history[1:]]
    await together.ask([*history, tool("x")])
    assert len(together.segments()) == 1
    assert client.engine.requests[0].prompt_ids == together.engine.requests[0].prompt_ids


async def test_reminders_of_the_system_may_come_in_mid_conversation():
    client = Client(CALL, CALL, "done")
    history = await client.ask([system("sys"), user("q")])
    history = await client.ask([*history, tool("x"), system("remember the date")])
    await client.ask([*history, tool("y"), system("and this")])
    (segment,) = client.segments()
    assert (
        segment.token_ids[: len(client.engine.requests[2].prompt_ids)]
        == client.engine.requests[2].prompt_ids
    )
