"""Decisions about the context, and the managers that carry them out in the tool loop."""

import pytest

from fakes import FakeEngine, ScriptedPolicy
from longarc.config.context import HierarchicalContext, KeepRecentContext, SummaryContext
from longarc.envs.context import FOLDED, folded, must_summarise, resumed, rounds
from longarc.envs.tool_loop import run_tool_loop
from longarc.errors import ConfigError
from longarc.gateway.core import Gateway
from longarc.records.lineage import Lineage
from longarc.records.message import Role
from longarc.records.outcome import Outcome
from longarc.records.sampling import Sampling
from longarc.records.segment import SegmentKind
from longarc.records.task import Task
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

TASK = Task(
    id="t/0", family="t", split="train", messages=(system("s"), user("task")), tools=(BASH,)
)


def look(number):
    return assistant(f"look {number}", calls=(call("bash", call_id=f"c{number}", command="x"),))


async def ten_words(arguments):
    return "one two three four five six seven eight nine ten"


async def play(script, context, *, max_tokens=1000, max_turns=20, tools=None):
    policy = ScriptedPolicy(script, max_tokens=max_tokens)
    episode = await run_tool_loop(
        policy, TASK, tools or {"bash": ten_words}, max_turns=max_turns, context=context
    )
    return policy, episode


# Decisions


def test_a_round_is_an_answer_with_all_its_results():
    conversation = [user("t"), look(0), tool("a"), tool("b"), look(1), tool("c"), assistant("end")]
    assert [len(one) for one in rounds(conversation, num_opening=1)] == [3, 2, 1]
    assert rounds([user("t")], num_opening=1) == []


def test_all_results_of_an_old_round_are_folded_and_examples_in_the_task_are_not():
    opening = [user("like this"), look(9), tool("shown"), user("task")]
    conversation = [*opening, look(0), tool("a"), tool("b"), look(1), tool("c")]
    shown = folded(conversation, num_opening=4, keep_recent=1)
    assert [m.content for m in shown if m.role is Role.TOOL] == ["shown", FOLDED, FOLDED, "c"]
    assert [m.tool_call_id for m in shown] == [m.tool_call_id for m in conversation]


@pytest.mark.parametrize(
    ("unused", "num", "asks"),
    [(11, 0, False), (10, 0, False), (9, 0, True), (9, 2, True), (9, 3, False)],
)
def test_a_summary_is_due_below_the_threshold_while_one_is_allowed(unused, num, asks):
    due = must_summarise(unused, below_tokens=10, num_compactions=num, max_compactions=3)
    assert due is asks


def test_a_summary_joins_the_task_and_recent_rounds_follow_whole():
    recent = [(look(1), tool("b"), tool("c"))]
    assert resumed([system("s"), user("task")], "S", recent) == (
        system("s"),
        user("task\n\nS"),
        look(1),
        tool("b"),
        tool("c"),
    )
    assert resumed([system("s")], "S", []) == (system("s"), user("S"))


# In the loop


async def test_without_a_policy_requests_say_nothing_of_themselves():
    policy, episode = await play([look(0), assistant("done")], None)
    assert {asked[2] for asked in policy.asked} == {None}
    assert episode.info == {"num_tool_calls": 1, "num_tool_errors": 0}


async def test_recent_results_are_shown_and_older_ones_are_folded():
    script = [*(look(n) for n in range(4)), assistant("done")]
    policy, episode = await play(script, KeepRecentContext(keep_recent=2))
    folds = [[m.content == FOLDED for m in seen if m.role is Role.TOOL] for seen in policy.seen]
    assert folds == [[], [False], [False] * 2, [True, False, False], [True, True, False, False]]
    assert not any(m.content == FOLDED for m in episode.messages), "what was said is recorded"
    assert episode.info["num_folded_rounds"] == 2


async def test_a_history_above_the_threshold_is_discarded_and_the_rollout_starts_again():
    script = [*(look(n) for n in range(5)), assistant("done")]
    context = HierarchicalContext(keep_recent=9, discard_above_tokens=30)
    policy, episode = await play(script, context)
    # Task 2 words, a round 12: two rounds fit below 30, three do not.
    assert [len(seen) for seen in policy.seen] == [2, 4, 6, 2, 4, 6]
    assert [asked[2] for asked in policy.asked] == [
        Lineage(kind=SegmentKind.EXEC, window=window) for window in (0, 0, 0, 1, 1, 1)
    ]
    assert episode.info["num_discards"] == 1
    assert episode.outcome is Outcome.COMPLETED


async def test_folding_stays_on_below_the_threshold():
    script = [*(look(n) for n in range(4)), assistant("done")]
    policy, episode = await play(
        script, HierarchicalContext(keep_recent=0, discard_above_tokens=900)
    )
    assert all(m.content == FOLDED for m in policy.seen[-1] if m.role is Role.TOOL)
    assert episode.info["num_discards"] == 0


async def test_a_threshold_that_the_context_never_reaches_is_an_error():
    with pytest.raises(ConfigError, match="never reached: the session's context has 1000"):
        await play([look(0)], HierarchicalContext(discard_above_tokens=1000))


def summary_context(**settings):
    return SummaryContext(
        **{"below_unused_tokens": 60, "keep_rounds": 1, "request": "Sum up.", **settings}
    )


async def test_the_policy_sums_up_when_room_runs_out_and_goes_on_from_there():
    script = [look(0), look(1), look(2), assistant("found x"), look(3), assistant("done")]
    context = summary_context(max_summary_tokens=7, max_compactions=1)
    policy, episode = await play(script, context, max_tokens=90)
    # 90 - (2 + 3 * 12) = 52 < 60: after the third round.
    asks = policy.seen[3]
    assert asks[-1] == user("Sum up.")
    assert asks[:-1] == (*TASK.messages, *episode_rounds(policy, 3))
    assert policy.asked[3] == (
        TASK.tools,
        "none",
        Lineage(kind=SegmentKind.SUMMARY, window=0),
        7,
    ), "tools stay in the prompt of a summary"
    resumed_at = policy.seen[4]
    assert resumed_at[1] == user("task\n\nSummary of the work so far:\nfound x")
    assert resumed_at[2:] == (look(2), tool(await ten_words({}), call_id="c2"))
    assert policy.asked[4][1:3] == ("auto", Lineage(kind=SegmentKind.EXEC, window=1))
    assert (episode.info["num_compactions"], episode.num_turns) == (1, 5)
    assert episode.outcome is Outcome.COMPLETED


def episode_rounds(policy, num):
    return policy.seen[num][2:-1]


async def test_fewer_rounds_are_kept_where_more_would_not_leave_room():
    script = [look(0), look(1), look(2), assistant("s"), assistant("done")]
    # Behind the summary 9 words; a round more has 12: none of them leaves 75 of 90.
    policy, _ = await play(
        script, summary_context(keep_rounds=2, below_unused_tokens=75), max_tokens=90
    )
    assert [len(seen) for seen in policy.seen][:4] == [2, 4, 7, 2]


async def test_no_more_summaries_are_asked_for_than_allowed():
    script = [look(n) for n in range(12)]
    policy, episode = await play(
        script, summary_context(max_compactions=2, keep_rounds=0), max_tokens=90, max_turns=9
    )
    kinds = [asked[2].kind for asked in policy.asked]
    assert kinds.count(SegmentKind.SUMMARY) == 2 == episode.info["num_compactions"]


async def test_a_summary_that_finds_no_room_ends_as_truncated():
    policy, episode = await play([look(0), look(1), look(2)], summary_context(), max_tokens=90)
    assert len(policy.seen) == 4
    assert (episode.outcome, episode.num_turns) == (Outcome.TRUNCATED_TOKENS, 3)


async def test_a_threshold_that_is_always_reached_is_an_error():
    with pytest.raises(ConfigError, match="always reached: the session's context has 60"):
        await play([look(0)], summary_context(), max_tokens=60)


# With a real session


def completion(text):
    return sampled(text)


def bash(number):
    return f"<tool_call>bash<arg_key>command</arg_key><arg_value>{number}</arg_value></tool_call><|observation|>"


async def in_a_session(completions, context, *, max_context_tokens, thinking=False):
    engine = FakeEngine([completion(text) for text in completions])
    session = Gateway(engine, GlmFormat(small_tokenizer())).open(
        "s/1",
        sampling=Sampling(max_new_tokens=64),
        thinking=thinking,
        max_context_tokens=max_context_tokens,
    )
    episode = await run_tool_loop(session, TASK, {"bash": ten_words}, max_turns=20, context=context)
    return engine, session, episode


async def test_a_compaction_makes_ordered_segments_in_which_the_summary_is_trained():
    script = [bash(0), bash(1), "found x<|user|>", bash(2), "done<|user|>"]
    # The task takes 513 tokens, a round 64 more, the task with summary and one round 605.
    engine, session, episode = await in_a_session(
        script,
        SummaryContext(below_unused_tokens=1380, keep_rounds=1, max_compactions=1),
        max_context_tokens=2000,
    )
    assert episode.info["num_compactions"] == 1, [len(r.prompt_ids) for r in engine.requests]
    first, summary, second = session.segments()
    assert [s.kind for s in (first, summary, second)] == [
        SegmentKind.EXEC,
        SegmentKind.SUMMARY,
        SegmentKind.EXEC,
    ]
    assert [s.order for s in (first, summary, second)] == [0, 1, 2]
    assert [s.window for s in (first, summary, second)] == [0, 0, 1]
    assert (summary.parent, second.parent) == (0, 1)
    assert trained_text(summary) == "found x<|user|>"
    assert trained_text(first) == bash(0) + bash(1)
    assert trained_text(second) == bash(2) + "done<|user|>"
    assert summary.token_ids[: len(first.token_ids)] == first.token_ids, "one break in all"
    copied = text_of(second.token_ids)
    assert "Summary of the work so far:\nfound x" in copied
    assert "<arg_value>1</arg_value>" in copied
    assert "<arg_value>0</arg_value>" not in copied


def trained_text(segment):
    pairs = zip(segment.token_ids, segment.train_mask, strict=True)
    return text_of([token for token, trained in pairs if trained])


async def test_folding_makes_branches_that_train_each_token_once():
    script = [bash(0), bash(1), bash(2), "done<|user|>"]
    engine, session, _ = await in_a_session(
        script, KeepRecentContext(keep_recent=1), max_context_tokens=2000
    )
    segments = session.segments()
    assert [trained_text(s) for s in segments] == [bash(0) + bash(1), bash(2), "done<|user|>"]
    assert {s.kind for s in segments} == {SegmentKind.EXEC}
    assert text_of(engine.requests[-1].prompt_ids).count(FOLDED) == 2


async def test_what_a_session_says_of_its_context_is_what_the_next_prompt_takes():
    engine, session, _ = await in_a_session(
        [bash(0), "done<|user|>"], None, max_context_tokens=2000
    )
    messages = [*TASK.messages]
    assert session.context_use(messages, tools=TASK.tools).num_tokens == len(
        engine.requests[0].prompt_ids
    )
    assert session.context_use(messages, tools=TASK.tools).max_tokens == 2000
