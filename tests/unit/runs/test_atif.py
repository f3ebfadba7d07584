"""Trajectories as ATIF documents and back."""

import copy
import json
import math
from dataclasses import replace

import pytest

from atif_rules import broken_rules
from ledger_cases import make_segment, make_trajectory
from longarc.errors import ContractError
from longarc.records.message import Message, Role, ToolCall
from longarc.records.segment import Segment, SegmentKind
from longarc.records.turn import Turn
from longarc.runs.atif import trajectory_to_atif
from longarc.runs.atif_import import trajectories_from_atif, untrained_messages
from longarc.runs.record_json import to_json_line


def user(content):
    return Message(role=Role.USER, content=content)


def said(content, **more):
    return Message(role=Role.ASSISTANT, content=content, **more)


def written(document):
    """A document as another program gets it: strict JSON."""
    line = to_json_line(document)
    assert not broken_rules(document), broken_rules(document)
    return json.loads(line, parse_constant=pytest.fail)


def there_and_back(trajectory, **options):
    return trajectories_from_atif(written(trajectory_to_atif(trajectory, **options)), name="x")


def a_segment(prompt, answers, **fields):
    """A prompt, then answers (ids) with one token of context between two of them."""
    ids, sampled = list(prompt), [False] * len(prompt)
    for number, answer in enumerate(answers):
        ids += [7] * (number > 0) + list(answer)
        sampled += [False] * (number > 0) + [True] * len(answer)
    fields = {"train_mask": tuple(sampled), **fields}
    return Segment(
        token_ids=tuple(ids),
        is_sampled=tuple(sampled),
        behaviour_logprobs=tuple(-0.5 if s else 0.0 for s in sampled),
        policy_versions=tuple(3 if s else -1 for s in sampled),
        **fields,
    )


def a_turn(order, start, num_sampled, said_now, answer, **fields):
    fields = {"parent": None, "finish_reason": "stop", "elapsed_s": 1.5, **fields}
    return Turn(
        segment_order=order,
        start=start,
        num_sampled=num_sampled,
        said=tuple(said_now),
        answer=answer,
        **fields,
    )


def a_session():
    """An agent that works, starts another, and goes on behind a compaction."""
    call = ToolCall(id="t1", name="bash", arguments={"command": "ls"})
    task = Message(role=Role.SYSTEM, content="sys"), user("find it")
    return replace(
        make_trajectory(),
        segments=(
            a_segment([1, 2, 3], [[4, 5], [6]]),
            a_segment([1, 9], [[8]], order=1, agent_id="helper", parent_agent_id="main", parent=0),
            a_segment([1, 1], [[2]], order=2, kind=SegmentKind.SIDE, train_mask=(False,) * 3),
            a_segment([1, 2, 3, 3], [[5, 6, 7]], order=3, parent=0, window=1),
        ),
        turns=(
            a_turn(0, 3, 2, task, said("", reasoning="hm", tool_calls=(call,))),
            a_turn(1, 2, 1, [user("help")], said("helped")),
            a_turn(2, 2, 1, [user("title?")], said("A title")),
            a_turn(0, 6, 1, [Message(role=Role.TOOL, content="a", tool_call_id="t1")], said("half"), parent=0),
            a_turn(3, 4, 3, [*task, user("so far: half"), user("so far: half")], said("found")),
        ),
        num_turns=5,
    )  # fmt: skip


def test_a_trajectory_comes_back_equal_and_its_document_keeps_the_rules():
    for trajectory in (make_trajectory(num_segments=3, length=37), a_session()):
        assert there_and_back(trajectory) == (trajectory,)
        assert there_and_back(trajectory, with_prompt_ids=False) == (trajectory,)


def test_each_step_of_the_policy_has_the_tokens_of_its_turn():
    document = trajectory_to_atif(a_session())
    main, *_ = [document["steps"]]
    agent = [step for step in main if step["source"] == "agent"]
    assert [step["metrics"]["completion_token_ids"] for step in agent] == [[4, 5], [6], [5, 6, 7]]
    assert [step["metrics"]["prompt_token_ids"] for step in agent] == [
        [1, 2, 3],
        [1, 2, 3, 4, 5, 7],
        [1, 2, 3, 3],
    ]
    assert agent[0]["metrics"]["logprobs"] == [-0.5, -0.5]
    assert agent[2]["metrics"]["extra"] == {
        "policy_versions": [[3, 3]],
        "segment": 3,
        "window": 1,
        "kind": "exec",
    }
    assert agent[0]["timestamp"] == "2023-11-14T22:13:22+00:00"
    lean = trajectory_to_atif(a_session(), with_prompt_ids=False)
    assert not any("prompt_token_ids" in step.get("metrics", ()) for step in lean["steps"])


def test_other_agents_and_side_requests_are_documents_in_the_document():
    document = trajectory_to_atif(a_session())
    helper, side = document["subagent_trajectories"]
    first = document["steps"][2]
    assert first["observation"]["results"] == [
        {"subagent_trajectory_ref": [{"trajectory_id": helper["trajectory_id"]}]},
        {"source_call_id": "t1", "content": "a"},
    ]
    assert helper["agent"]["extra"] == {"agent_id": "helper", "kind": "exec"}
    assert side["agent"]["extra"]["kind"] == "side"
    assert [step["message"] for step in side["steps"]] == ["title?", "A title"]


def test_what_a_new_window_repeats_is_marked_and_what_it_says_anew_is_not():
    steps = trajectory_to_atif(a_session())["steps"]
    window = [(step["message"], step.get("is_copied_context", False)) for step in steps[4:]]
    assert window == [
        ("sys", True),
        ("find it", True),
        ("so far: half", False),
        ("so far: half", False),
        ("found", False),
    ]


def test_answers_that_a_task_came_with_are_not_the_policys():
    shown = (user("2+2"), said("4"), user("3+3"), said("6"))
    trajectory = replace(
        make_trajectory(), messages=shown, num_turns=1, segments=(a_segment([1, 2], [[6]]),)
    )
    steps = trajectory_to_atif(trajectory)["steps"]
    assert steps[1]["is_copied_context"]
    assert "metrics" not in steps[1]
    assert steps[3]["metrics"]["completion_token_ids"] == [6]


def test_where_tokens_and_messages_cannot_be_matched_the_notes_say_so_and_nothing_is_lost():
    trajectory = replace(make_trajectory(), num_turns=9)
    document = trajectory_to_atif(trajectory)
    assert not any("metrics" in step for step in document["steps"])
    assert document["notes"].startswith("The policy completed 2 texts in 9 turns, and 2 messages")
    assert there_and_back(trajectory) == (trajectory,)


def test_a_trajectory_without_any_conversation_is_one_empty_step():
    trajectory = replace(make_trajectory(), messages=(), segments=(), num_turns=0)
    document = trajectory_to_atif(trajectory)
    assert [step["message"] for step in document["steps"]] == [""]
    assert there_and_back(trajectory) == (trajectory,)


def test_what_json_cannot_hold_is_spelt_out_for_others_and_comes_back_as_it_was():
    odd = {"a": math.inf, "\ud800": ["\udfff", math.nan]}
    call = ToolCall(id="\ud800", name="f", arguments={"x": -math.inf}, error="no \ud800")
    trajectory = replace(
        make_trajectory(),
        id="\ud800",
        messages=(user("\ud800"), said("\udc00", reasoning="\ud800", tool_calls=(call,))),
        segments=(replace(make_segment(), agent_id="\ud800"),),
        reward_parts={"a": -math.inf},
        info=odd,
    )
    (back,) = there_and_back(trajectory)
    assert math.isnan(back.info["\ud800"][1])
    assert replace(back, info={}) == replace(trajectory, info={})
    document = trajectory_to_atif(trajectory)
    assert document["final_metrics"]["extra"]["reward_parts"] == {"a": "-inf"}
    assert document["steps"][0]["message"] == "\\ud800"


def test_logprobs_that_are_no_numbers_stay_in_the_record():
    segment = a_segment([1], [[2]])
    trajectory = replace(
        make_trajectory(),
        segments=(replace(segment, behaviour_logprobs=(0.0, -math.inf)),),
        messages=(user("q"), said("a")),
        num_turns=1,
    )
    assert "logprobs" not in trajectory_to_atif(trajectory)["steps"][1]["metrics"]
    assert there_and_back(trajectory) == (trajectory,)


def test_a_document_that_another_tool_wrote_again_still_has_its_record():
    trajectory = replace(
        make_trajectory(),
        messages=(
            user("q"),
            said(
                "",
                tool_calls=(ToolCall(id="c", name="f", arguments={"n": 1.0, "m": None, "a": [2]}),),
            ),
        ),
    )
    document = written(trajectory_to_atif(trajectory))
    arguments = document["steps"][1]["tool_calls"][0]["arguments"]
    document["steps"][1]["tool_calls"][0]["arguments"] = {"a": arguments["a"], "n": 1}
    document["steps"][0]["reasoning_content"] = None
    document["steps"][0]["tool_calls"] = None
    document["steps"][1]["observation"] = None
    document["subagent_trajectories"] = None
    assert trajectories_from_atif(document, name="x") == (trajectory,)


@pytest.mark.parametrize(
    "edit",
    [
        lambda steps: steps[0].update(message="Find another word."),
        lambda steps: steps[1]["tool_calls"][0]["arguments"].update(cmd="rm -r ."),
        lambda steps: steps[1]["observation"]["results"][0].update(content="nothing"),
        lambda steps: steps.pop(),
    ],
)
def test_a_document_whose_steps_were_edited_is_not_taken_for_its_record(edit):
    document = written(trajectory_to_atif(make_trajectory()))
    edit(document["steps"])
    with pytest.raises(ContractError, match=r"steps were edited.*Take extra\.longarc out"):
        trajectories_from_atif(document, name="x")
    del document["extra"]["longarc"]
    (read,) = trajectories_from_atif(document, name="x")
    assert read.stage == "import"


@pytest.mark.parametrize("held", ["text", {"record": 5}, {}])
def test_a_record_that_is_none_is_refused(held):
    document = written(trajectory_to_atif(make_trajectory()))
    document["extra"]["longarc"] = held
    with pytest.raises(ContractError, match="without a record"):
        trajectories_from_atif(document, name="x")
    document["extra"]["longarc"] = {"record": "{"}
    with pytest.raises(ContractError, match="ATIF document 'x'"):
        trajectories_from_atif(document, name="x")


def test_what_is_nested_too_deep_for_python_is_refused_by_the_trajectorys_name():
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    call = ToolCall(id="c", name="f", arguments={"x": deep})
    trajectory = replace(make_trajectory(), messages=(said("", tool_calls=(call,)),))
    with pytest.raises(ContractError, match="'rl/0/0/0' cannot be written as ATIF: RecursionError"):
        trajectory_to_atif(trajectory)


# ------------------------------------------------------------------ documents of others

STEPS = (
    {"step_id": 1, "source": "system", "message": "You are an agent."},
    {
        "step_id": 2,
        "timestamp": "2026-01-01T00:00:00Z",
        "source": "user",
        "message": [{"type": "text", "text": "List "}, {"type": "text", "text": "files."}],
    },
    {
        "step_id": 3,
        "timestamp": "2026-01-01T00:00:05+00:00",
        "source": "agent",
        "model_name": "m",
        "message": "",
        "reasoning_content": "ls",
        "tool_calls": [
            {"tool_call_id": "a", "function_name": "bash", "arguments": {"command": "ls"}},
            {"tool_call_id": "b", "function_name": "bash", "arguments": {}},
        ],
        "observation": {
            "results": [
                {"source_call_id": "a", "content": "x.txt"},
                {"source_call_id": "b", "content": [{"type": "text", "text": "error"}]},
                {"subagent_trajectory_ref": [{"trajectory_id": "s1"}]},
            ]
        },
        "metrics": {
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3, 4],
            "logprobs": [-1, -0.5],
        },
    },
    {
        "step_id": 4,
        "source": "agent",
        "message": "x.txt",
        "metrics": {
            "prompt_token_ids": [1, 2, 3, 4, 5],
            "completion_token_ids": [6],
            "logprobs": [-0.25],
        },
    },
)


def foreign(steps=STEPS, **more):
    return {
        "schema_version": "ATIF-v1.6",
        "session_id": "run",
        "agent": {
            "name": "terminus-2",
            "version": "1",
            "tool_definitions": [{"name": "bash", "input_schema": {"type": "object"}}],
        },
        "steps": copy.deepcopy(list(steps)),
        **more,
    }


def test_a_foreign_document_with_tokens_becomes_segments():
    (read,) = trajectories_from_atif(foreign(notes="n"), name="t")
    (segment,) = read.segments
    assert segment.token_ids == (1, 2, 3, 4, 5, 6)
    assert segment.is_sampled == (False, False, True, True, False, True)
    assert segment.train_mask == segment.is_sampled
    assert segment.behaviour_logprobs == (0.0, 0.0, -1.0, -0.5, 0.0, -0.25)
    assert (read.id, read.stage, read.family, read.reward, read.num_turns) == (
        "t",
        "import",
        "terminus-2",
        None,
        2,
    )
    assert read.duration_s == 5.0
    assert read.tools[0].name == "bash"
    told = read.info["atif"]
    assert told["schema_version"] == "ATIF-v1.6"
    assert (told["notes"], told["session_id"]) == ("n", "run")
    assert [(m.role, m.content, m.tool_call_id) for m in read.messages] == [
        (Role.SYSTEM, "You are an agent.", None),
        (Role.USER, "List files.", None),
        (Role.ASSISTANT, "", None),
        (Role.TOOL, "x.txt", "a"),
        (Role.TOOL, "error", "b"),
        (Role.ASSISTANT, "x.txt", None),
    ]
    assert read.messages[2].reasoning == "ls"
    assert read.messages[2].tool_calls[0].arguments == {"command": "ls"}


def test_a_prompt_that_does_not_continue_the_last_one_opens_a_window():
    document = foreign()
    document["steps"][3]["metrics"]["prompt_token_ids"] = [1, 2, 3]
    (read,) = trajectories_from_atif(document, name="t")
    assert [(s.window, s.parent, s.token_ids) for s in read.segments] == [
        (0, None, (1, 2, 3, 4)),
        (1, 0, (1, 2, 3, 6)),
    ]
    assert read.num_trained_tokens == 3


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": None},
        {"metrics": {"prompt_token_ids": [1], "completion_token_ids": [2]}},
        {"llm_call_count": 2},
    ],
)
def test_a_step_without_exact_tokens_leaves_the_conversation_alone(change):
    document = foreign()
    document["steps"][3].update(change)
    (read,) = trajectories_from_atif(document, name="t")
    assert read.segments == ()
    assert len(read.messages) == 6


def test_what_was_copied_or_written_by_no_model_is_told():
    document = foreign()
    document["steps"][2]["is_copied_context"] = True
    document["steps"][3] |= {"llm_call_count": 0, "metrics": None}
    (read,) = trajectories_from_atif(document, name="t")
    assert untrained_messages(read) == {2, 5}
    assert (read.num_turns, read.segments) == (0, ())
    assert untrained_messages(make_trajectory()) is None


def test_what_an_agent_without_calls_got_back_is_the_users():
    observed = {"results": [{"content": "$ ls"}]}
    steps = [
        {"step_id": 1, "source": "agent", "message": "ls", "observation": observed},
        {"step_id": 2, "source": "system", "message": "", "observation": observed},
        {"step_id": 3, "source": "system", "message": ""},
    ]
    (read,) = trajectories_from_atif(foreign(steps), name="t")
    assert [m.role for m in read.messages] == [Role.ASSISTANT, Role.USER, Role.USER, Role.SYSTEM]


def test_inner_documents_are_trajectories_of_their_own_in_one_group():
    inner = foreign(trajectory_id="s1", subagent_trajectories=[foreign(trajectory_id="s2")])
    read = trajectories_from_atif(
        foreign(trajectory_id="root", subagent_trajectories=[inner]), name="t"
    )
    assert [t.id for t in read] == ["root", "root/s1", "root/s1/s2"]
    assert {t.group_id for t in read} == {"root"}
    assert [(t.segments[0].agent_id, t.segments[0].parent_agent_id) for t in read] == [
        ("main", None),
        ("root/s1", "main"),
        ("root/s1/s2", "root/s1"),
    ]


def test_tools_in_the_form_of_function_calling_are_read():
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    document = foreign()
    document["agent"]["tool_definitions"] = [{"type": "function", "function": function}, {"name": "g"}]  # fmt: skip
    (read,) = trajectories_from_atif(document, name="t")
    assert [(t.name, t.description) for t in read.tools] == [("f", "d"), ("g", "")]
    assert read.tools[1].parameters == {"type": "object", "properties": {}}


def damaged(change):
    document = foreign()
    change(document)
    return document


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "holds a list"),
        ({}, "schema_version None"),
        (foreign(schema_version="ATIF-v1.9"), r"ATIF-v1.9.*ATIF-v1.0 to ATIF-v1.8"),
        (foreign(schema_version="ATIF-v1.²"), "can be read"),
        (foreign(schema_version="ATIF-v2.0"), "can be read"),
        (foreign(steps=[]), "steps: List should have at least 1"),
        (foreign(agent={"name": "a"}), "agent.version: Field required"),
        (foreign(extra=5), "extra"),
        (damaged(lambda d: d["steps"].pop(0)), "step 1 is numbered 2"),
        (damaged(lambda d: d["steps"][0].update(source="tool")), r"steps\.0\.source.*'tool'"),
        (damaged(lambda d: d["steps"][0].pop("message")), r"steps\.0\.message: Field required"),
        (damaged(lambda d: d["steps"][0].update(message=5)), r"steps\.0\.message"),
        (damaged(lambda d: d["steps"][1]["message"][0].update(type="image")), "type 'image'"),
        (damaged(lambda d: d["steps"][2].update(timestamp="soon")), "timestamp 'soon'"),
        (
            damaged(lambda d: d["steps"][2]["observation"]["results"][0].update(source_call_id="z")),
            r"result of call 'z', but calls \['a', 'b'\]",
        ),
        (damaged(lambda d: d["steps"][2]["tool_calls"][0].update(arguments="{}")), "arguments"),
        (damaged(lambda d: d["steps"][3]["metrics"].update(logprobs=[])), "1 completion_token_ids"),
        (damaged(lambda d: d["steps"][3]["metrics"].update(logprobs=[math.nan])), "finite"),
        (
            damaged(lambda d: d["steps"][3]["metrics"].update(completion_token_ids=[True])),
            "completion_token_ids.0",
        ),
        (
            damaged(lambda d: d["steps"][3]["metrics"].update(completion_token_ids=[-1])),
            "greater than or equal to 0",
        ),
        (
            damaged(lambda d: d["steps"][3]["metrics"].update(prompt_token_ids=[2**31])),
            "2147483647",
        ),
        (damaged(lambda d: d["agent"].update(tool_definitions=[{"x": 1}])), "without a name"),
        (foreign(subagent_trajectories=[foreign()]), "trajectory_id"),
        (
            foreign(subagent_trajectories=[foreign(trajectory_id="s", steps=[{"step_id": 1}])]),
            r"subagent_trajectories\.0\.steps\.0\.source: Field required",
        ),
    ],
)  # fmt: skip
def test_a_document_that_is_none_is_refused_by_name(document, says):
    with pytest.raises(ContractError, match=says):
        trajectories_from_atif(document, name="t.json")
