from dataclasses import replace

import pytest

from ledger_cases import make_segment
from longarc.records.batch import TokenReport
from longarc.records.outcome import Disposition, Outcome
from longarc.records.segment import Segment
from longarc.runs.reader import TrajectoryRow
from longarc.viewer.trajectories import TokenTexts, choose, origin, segment_entry
from report_cases import EVIL, make_tokenizer

ROW = TrajectoryRow(
    id="x",
    stage="rl",
    group_id="rl/0",
    task_id="t",
    family="files",
    outcome=Outcome.COMPLETED,
    reward=1.0,
    num_turns=1,
    num_segments=1,
    num_tokens=1,
    num_sampled_tokens=1,
    num_trained_tokens=1,
    oldest_version=0,
    newest_version=0,
    difficulty=1.0,
    started_at_s=0.0,
    duration_s=0.0,
    error=None,
    completed_at_s=0.0,
    disposition=None,
    disposition_reason=None,
)


def many(count, **fields):
    name = "-".join(str(value) for value in fields.values())
    return [replace(ROW, id=f"{name}-{i}", **fields) for i in range(count)]


def ids(rows, reported, limit):
    return [row.id for row in choose(rows, reported, limit)]


def test_rare_kinds_are_shown_however_many_there_are_of_the_others():
    rows = [
        *many(500, family="files", reward=0.0),
        *many(2, family="files", reward=1.0),
        *many(1, family="recall", reward=None),
        *many(300, family="recall", reward=0.5),
    ]
    chosen = ids(rows, frozenset(), 20)
    assert len(chosen) == len(set(chosen)) == 20
    assert {"files-1.0-0", "files-1.0-1", "recall-None-0"} <= set(chosen)


def test_a_kind_is_shown_from_its_beginning_to_its_end():
    assert ids(many(100, reward=0.0), frozenset(), 3) == ["0.0-0", "0.0-50", "0.0-99"]


def test_those_with_token_reports_come_first_and_leave_room_for_others():
    rows = [*many(50, reward=0.0), *many(50, reward=1.0)]
    reported = frozenset(f"0.0-{i}" for i in range(1, 50, 2))
    chosen = ids(rows, reported, 10)
    assert len(reported & set(chosen)) >= 6
    assert any(name.startswith("1.0") for name in chosen)
    assert ids(rows, reported, 0) == []


def test_all_are_shown_where_there_is_room():
    rows = [*many(5, reward=0.0), *many(3, reward=1.0)]
    assert choose(rows, frozenset({"0.0-2"}), 100) == rows


def test_an_evaluation_names_the_checkpoint_that_sampled():
    evaluated = replace(ROW, stage="eval", disposition=Disposition.EVALUATED)
    assert origin(replace(evaluated, group_id="eval/sft/files/3")) == "eval/sft"
    assert origin(replace(evaluated, group_id="odd")) == "eval"
    assert origin(ROW) == "rl"


SEGMENT = Segment(
    token_ids=(10, 11, 12, 13),
    is_sampled=(False, True, True, True),
    train_mask=(False, True, False, True),
    behaviour_logprobs=(0.0, -1.0, -2.0, -3.0),
    policy_versions=(-1, 4, 4, 5),
)


def report(**fields):
    values = {
        "trajectory_id": "x",
        "segment_order": 0,
        "policy_logprobs": (0.0, -1.5, 0.0, -2.0),
        "advantages": (0.0, 0.25, 0.0, -0.75),
    }
    return TokenReport(**(values | fields))


def test_each_token_is_written_with_its_mask_and_only_with_numbers_it_has():
    entry = segment_entry(SEGMENT, (7, report()))
    assert entry["mask"] == ".TsT"
    assert entry["logprobs"] == [-1.0, -2.0, -3.0]
    assert entry["versions"] == [[4, 2], [5, 1]]
    assert entry["report"] == {
        "step": 7,
        "log_ratios": [-0.5, 1.0],
        "advantages": [0.25, -0.75],
        "values": None,
    }


def test_the_values_of_a_critic_are_written_where_there_is_one():
    entry = segment_entry(SEGMENT, (7, report(values=(0.0, 0.5, 0.0, 0.625))))
    assert entry["report"]["values"] == [0.5, 0.625]


def test_a_report_of_another_length_is_none():
    assert segment_entry(SEGMENT, (7, report(advantages=(0.0,))))["report"] is None
    assert segment_entry(SEGMENT, None)["report"] is None


def test_token_texts_show_control_tokens_halves_of_characters_and_unknown_ids():
    tokenizer = make_tokenizer()
    texts = TokenTexts(tokenizer)
    evil, half = tokenizer.special_id(EVIL), tokenizer.encode("ü")[0]
    unknown = tokenizer.vocab_size
    texts.add([evil, half, unknown, evil])
    assert texts.texts == {
        evil: EVIL,
        half: "\\xc3",
        unknown: f"[{unknown}: not in the tokenizer]",
    }
    assert texts.special_ids == [evil]


def test_without_a_tokenizer_ids_stand_for_themselves():
    texts = TokenTexts(None)
    texts.add(make_segment(length=3).token_ids[:1])
    ((token_id, text),) = texts.texts.items()
    assert text == f"[{token_id}]"


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_ids_no_vocabulary_has_are_shown_as_such(token_id):
    texts = TokenTexts(make_tokenizer())
    texts.add([token_id])
    assert str(token_id) in texts.texts[token_id]
