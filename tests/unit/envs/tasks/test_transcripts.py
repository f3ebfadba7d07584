"""Recorded conversations as demonstrations: which there are, and what of them is learnt from."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ledger_cases import TOOL, make_admission, make_segment, make_trajectory
from longarc.config.recipe import TaskFamilyConfig
from longarc.config.stages import TaskShare
from longarc.data.sft import Expert, RecordedExpert, check_recorded, conversation_document
from longarc.envs.tasks.transcripts import Transcripts, conversations_of
from longarc.errors import ConfigError
from longarc.pipeline.workspace import family_object, task_family
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.segment import SegmentKind
from longarc.records.turn import Turn
from longarc.runs.exchange import json_lines, write_lines
from longarc.tokens.glm import GlmFormat
from token_samples import small_tokenizer

FORMAT = GlmFormat(small_tokenizer())
DOCUMENT = {
    "schema_version": "ATIF-v1.7",
    "trajectory_id": "t",
    "agent": {"name": "coder", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "go on"},
        {"step_id": 2, "source": "agent", "message": "copied", "is_copied_context": True},
        {"step_id": 3, "source": "agent", "message": "ran a check", "llm_call_count": 0},
        {"step_id": 4, "source": "user", "message": "well?"},
        {"step_id": 5, "source": "agent", "message": "word"},
    ],
}


def answer(content, **more):
    return Message(role=Role.ASSISTANT, content=content, **more)


def user(content):
    return Message(role=Role.USER, content=content)


def written(tmp_path, trajectories):
    path = tmp_path / "t.jsonl"
    write_lines(path, json_lines(trajectories))
    return str(path)


def learnt(conversation):
    return [
        m.content
        for i, m in enumerate(conversation.messages)
        if m.role is Role.ASSISTANT and i not in conversation.untrained
    ]


def trained_text(conversation):
    document = conversation_document(conversation, FORMAT, max_tokens=10_000)
    ids = [i for i, t in zip(document.token_ids, document.train_mask, strict=True) if t]
    return FORMAT.tokenizer.decode(ids)


def test_a_foreign_document_without_tokens_is_rendered_and_its_own_answers_are_learnt(tmp_path):
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(DOCUMENT))
    family = Transcripts(path=str(path))
    shown = family.demonstration(0)
    assert learnt(shown) == ["word"]
    assert shown.family == "coder"
    assert not shown.thinking
    text = trained_text(shown)
    assert "word" in text
    assert "copied" not in text
    assert "check" not in text


def test_all_are_shown_before_one_comes_again_and_then_in_another_order(tmp_path):
    trajectories = [
        replace(make_trajectory(), messages=(user(str(i)), answer(str(i))), num_turns=1)
        for i in range(6)
    ]
    family = Transcripts(path=written(tmp_path, trajectories))
    shown = [family.demonstration(i).messages[0].content for i in range(18)]
    epochs = [shown[i : i + 6] for i in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list("012345")] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = Transcripts(path=written(tmp_path, trajectories))
    assert [again.demonstration(i).messages[0].content for i in (7, 0, 17)] == [
        shown[7],
        shown[0],
        shown[17],
    ]
    other = Transcripts(path=written(tmp_path, trajectories), seed=1)
    assert [other.demonstration(i).messages[0].content for i in range(6)] != epochs[0]


def test_settings_choose_among_trajectories(tmp_path):
    trajectories = [
        make_trajectory(make_admission(0, 0), reward=0.0),
        make_trajectory(make_admission(0, 1), reward=1.0),
        make_trajectory(make_admission(0, 2, stage="other"), reward=1.0),
        make_trajectory(make_admission(0, 3), reward=None),
        make_trajectory(make_admission(0, 4), outcome=Outcome.TRUNCATED_TOKENS),
    ]
    path = written(tmp_path, trajectories)

    def number(**settings):
        return len(list(Transcripts(path=path, **settings).all_demonstrations()))

    assert number() == 4
    assert number(min_reward=0.5) == 2
    assert number(min_reward=0.5, stage="rl") == 1
    with pytest.raises(ConfigError, match=r"none of the 5 trajectories.*stage=nosuch"):
        number(stage="nosuch")
    with pytest.raises(ConfigError, match="max_chars=3"):
        number(max_chars=3)
    with pytest.raises(ConfigError, match="did you mean 'min_reward'"):
        number(min_rewards=1)
    with pytest.raises(ConfigError, match="path"):
        Transcripts()


def test_an_answer_that_a_task_was_given_with_and_calls_that_no_one_understood_are_context():
    bad = ToolCall(id="c", name="bash", arguments={}, error="not JSON")
    trajectory = replace(
        make_trajectory(),
        messages=(
            user("1"),
            answer("shown"),
            user("2"),
            answer("", tool_calls=(bad,)),
            answer("done", reasoning="so"),
        ),
        num_turns=2,
    )
    (conversation,) = conversations_of(trajectory)
    assert learnt(conversation) == ["done"]
    assert conversation.thinking
    only_bad = replace(trajectory, messages=trajectory.messages[:4], num_turns=1)
    assert conversations_of(only_bad) == []


def test_each_context_is_a_conversation_and_each_answer_is_learnt_once():
    look_up = ToolSpec(name="look_up", description="", parameters={"type": "object"})

    def turn(order, said, text, parent=None, **more):
        given = {"finish_reason": "stop", "tools": () if parent is not None else (TOOL,), **more}
        return Turn(
            segment_order=order,
            start=0,
            num_sampled=1,
            parent=parent,
            said=tuple(said),
            answer=answer(text),
            elapsed_s=0.0,
            **given,
        )

    trajectory = replace(
        make_trajectory(),
        segments=tuple(
            replace(make_segment(order=order), kind=kind)
            for order, kind in enumerate(
                [SegmentKind.EXEC, SegmentKind.SIDE, SegmentKind.EXEC, SegmentKind.SUMMARY]
            )
        ),
        turns=(
            turn(0, [user("task")], "first"),
            turn(1, [user("title?")], "Title"),
            turn(2, [user("help")], "helped", tools=(look_up,)),
            turn(0, [user("on")], "second", parent=0),
            turn(3, [user("sum up")], "summary", parent=0),
            turn(0, [user("more")], "cut off", parent=3, finish_reason="length"),
            turn(0, [answer("claimed"), user("anew")], "third"),
        ),
    )
    shown = conversations_of(trajectory)
    assert [learnt(c) for c in shown] == [["helped"], ["summary", "first"][::-1], ["second"], ["third"]]  # fmt: skip
    assert [c.tools for c in shown] == [(look_up,), (TOOL,), (TOOL,), (TOOL,)]
    assert [m.content for m in shown[2].messages] == [
        "task",
        "first",
        "on",
        "second",
        "more",
        "cut off",
    ]


def test_conversations_that_are_too_long_are_refused_before_the_first_step(tmp_path):
    family = Transcripts(path=written(tmp_path, [make_trajectory()] * 1))
    assert isinstance(family, Expert)
    assert isinstance(family, RecordedExpert)
    check_recorded("mine", family, FORMAT, max_tokens=10_000)
    with pytest.raises(
        ConfigError, match=r"1 of the 1 conversations of 'mine' have more than the 8"
    ):
        check_recorded("mine", family, FORMAT, max_tokens=8)


def test_a_recipe_names_it_for_sft_and_for_nothing_that_samples(tmp_path):
    share = TaskShare(settings={"path": written(tmp_path, [make_trajectory()])})
    config = TaskFamilyConfig(path="longarc.envs.tasks.transcripts:Transcripts")
    recipe = SimpleNamespace(tasks={"mine": config})
    assert isinstance(family_object(recipe, "mine", share), Expert)
    with pytest.raises(ConfigError, match=r"not a TaskFamily.*demonstration\(\) is for sft"):
        task_family(recipe, "mine", share)
