import dataclasses
import json
import math
import struct

import pytest

from ledger_cases import (
    make_admission,
    make_batch,
    make_group,
    make_report,
    make_task,
    make_trajectory,
)
from longarc.errors import ContractError, LedgerError
from longarc.records.constraint import ConstrainedSpan, Constraint
from longarc.records.message import Message, Role, ToolCall
from longarc.records.metric import Metric
from longarc.records.turn import Turn
from longarc.runs.codec import (
    batch_sha256,
    body_sha256,
    compress,
    decode_report,
    decode_task,
    decompress,
    encode_report,
    encode_task,
    from_json,
    pack_floats,
    to_json,
    trajectory_body,
    trajectory_from_body,
    unpack_floats,
)
from longarc.runs.record_form import check_form
from longarc.runs.record_json import to_json_line, trajectory_from_json, trajectory_to_json


def changed_segment(trajectory, **changes):
    segment = dataclasses.replace(trajectory.segments[0], **changes)
    return dataclasses.replace(trajectory, segments=(segment,))


def there_and_back(trajectory):
    return trajectory_from_body(decompress(compress(trajectory_body(trajectory))))


def test_a_trajectory_comes_back_equal():
    trajectory = make_trajectory(num_segments=3, length=37)
    assert there_and_back(trajectory) == trajectory


def test_a_trajectory_without_lineage_has_the_bytes_that_it_had_before_there_was_any():
    """The digest was taken before segments had parent agents and windows, and trajectories turns."""
    body = trajectory_body(make_trajectory(num_segments=3, length=37))
    assert body_sha256(body) == "b3039c48b5beb97de8cbcc55f3acd07b50458a1afe060ed4c3f6d80d2544a970"


def test_lineage_and_turns_come_back_from_the_ledger_and_from_json():
    trajectory = changed_segment(make_trajectory(), parent_agent_id="main", window=3)
    said = (Message(role=Role.USER, content="\ud800"),)
    turn = Turn(
        segment_order=0,
        start=4,
        num_sampled=3,
        parent=None,
        said=said,
        answer=trajectory.messages[1],
        finish_reason="stop",
        elapsed_s=0.5,
    )
    trajectory = dataclasses.replace(trajectory, turns=(turn,))
    assert there_and_back(trajectory) == trajectory
    line = to_json_line(trajectory_to_json(trajectory))
    assert line.isascii()
    assert "\n" not in line
    assert trajectory_from_json(json.loads(line)) == trajectory


def test_json_that_is_no_trajectory_is_refused():
    data = trajectory_to_json(make_trajectory())
    with pytest.raises(ContractError, match="format 'other'"):
        trajectory_from_json({**data, "format": "other"})
    del data["segments"]
    with pytest.raises(ContractError, match="damaged"):
        trajectory_from_json(data)


def test_a_trajectory_without_segments_or_reward_comes_back_equal():
    trajectory = dataclasses.replace(make_trajectory(reward=None), segments=())
    assert there_and_back(trajectory) == trajectory


def test_a_train_mask_of_its_own_comes_back():
    trajectory = make_trajectory()
    sampled = trajectory.segments[0].is_sampled
    masked = changed_segment(trajectory, train_mask=(False,) * len(sampled))
    assert there_and_back(masked) == masked


def test_what_tokens_were_drawn_from_comes_back_and_costs_others_no_byte():
    trajectory = make_trajectory()
    segment = trajectory.segments[0]
    pairs = zip(segment.token_ids, segment.is_sampled, strict=True)
    kept = tuple((token_id, token_id + 5) if is_sampled else () for token_id, is_sampled in pairs)
    truncated = changed_segment(trajectory, kept_ids=kept)
    assert there_and_back(truncated) == truncated
    assert b"kept" not in trajectory_body(trajectory)


def test_what_tokens_had_to_follow_comes_back_and_costs_others_no_byte():
    trajectory = make_trajectory()
    constraint = Constraint(json_schema='{"type": "string"}', reasoning="open", allows_calls=True)
    num = len(trajectory.segments[0].token_ids)
    spans = tuple(
        ConstrainedSpan(start=start, stop=stop, constraint=constraint, stop_ids=(7, 9))
        for start, stop in ((1, 2), (2, num))
    )
    constrained = changed_segment(trajectory, constraints=spans)
    assert there_and_back(constrained) == constrained
    as_json = trajectory_to_json(constrained)
    check_form(json.loads(to_json_line(as_json)))
    assert trajectory_from_json(as_json) == constrained
    assert b"constraints" not in trajectory_body(trajectory)
    for wrong in ((spans[1], spans[0]), (dataclasses.replace(spans[1], stop=num + 1),)):
        with pytest.raises(ContractError, match="constraints that overlap or go beyond"):
            changed_segment(trajectory, constraints=wrong)


def test_what_tokens_were_routed_to_comes_back_and_costs_others_no_byte():
    trajectory = make_trajectory()
    segment = trajectory.segments[0]
    blobs = [bytes(range(position % 7)) for position in range(len(segment.token_ids) - 1)]
    routed = changed_segment(trajectory, routing=(*blobs, b""))
    assert there_and_back(routed) == routed
    assert b"routing" not in trajectory_body(trajectory)
    assert there_and_back(trajectory).segments[0].routing is None
    both = changed_segment(routed, kept_ids=tuple((token,) for token in segment.token_ids))
    assert there_and_back(both) == both


def test_logprobs_that_are_not_float32_are_kept_as_float64():
    trajectory = make_trajectory()
    sampled = trajectory.segments[0].is_sampled
    fine = changed_segment(
        trajectory, behaviour_logprobs=tuple(-0.1 if s else 0.0 for s in sampled)
    )
    assert (
        there_and_back(fine).segments[0].behaviour_logprobs == fine.segments[0].behaviour_logprobs
    )


def test_a_logprob_where_nothing_was_sampled_is_not_lost():
    trajectory = make_trajectory()
    odd = changed_segment(trajectory, behaviour_logprobs=(-0.5,) * 12)
    assert there_and_back(odd) == odd


@pytest.mark.parametrize("value", [-0.0, math.nan, 5e-324])
def test_any_bit_where_nothing_was_sampled_is_kept(value):
    trajectory = make_trajectory()
    sampled = trajectory.segments[0].is_sampled
    odd = changed_segment(
        trajectory, behaviour_logprobs=tuple(-0.5 if s else value for s in sampled)
    )
    stored = there_and_back(odd).segments[0].behaviour_logprobs
    kept = [struct.pack("<d", v) for v, s in zip(stored, sampled, strict=True) if not s]
    assert kept == [struct.pack("<d", value)] * len(kept)
    assert kept


def test_infinite_logprobs_and_signed_zeros_keep_their_bits():
    values = [-math.inf, -0.0, 0.0, 2.0**-149, -103.25]
    dtype, data = pack_floats(values)
    back = unpack_floats(dtype, data, len(values))
    assert dtype == "<f4"
    assert [struct.pack("<d", x) for x in back] == [struct.pack("<d", x) for x in values]


def test_a_value_beyond_float32_is_kept_wide():
    assert pack_floats([1e300])[0] == "<f8"


def test_text_that_is_no_utf8_and_numbers_json_lacks_come_back():
    info = {"name": "\udcff.txt", "big": 2**70, "nan": math.nan, "float": 1.0, "int": 1}
    trajectory = dataclasses.replace(make_trajectory(), info=info)
    back = there_and_back(trajectory).info
    assert back["name"] == "\udcff.txt"
    assert back["big"] == 2**70
    assert math.isnan(back["nan"])
    assert isinstance(back["float"], float)
    assert isinstance(back["int"], int)


def test_tool_arguments_keep_their_order_because_they_are_rendered_again():
    call = ToolCall(id="c", name="f", arguments={"z": 1, "a": 2}, error="not an object")
    message = Message(role=Role.ASSISTANT, content="", tool_calls=(call,))
    back = there_and_back(dataclasses.replace(make_trajectory(), messages=(message,)))
    assert list(back.messages[0].tool_calls[0].arguments) == ["z", "a"]
    assert back.messages == (message,)


def test_five_hundred_tokens_take_about_two_kilobytes():
    size = len(compress(trajectory_body(make_trajectory(length=500))))
    assert size < 2600


def test_something_that_is_not_json_is_named():
    trajectory = dataclasses.replace(make_trajectory(), info={"handle": object()})
    with pytest.raises(ContractError, match=r"rl/0/0/0.*not a JSON value"):
        trajectory_body(trajectory)


def test_a_token_id_beyond_int32_is_refused():
    trajectory = changed_segment(make_trajectory(), token_ids=(2**31,) * 12)
    with pytest.raises(ContractError, match="cannot be stored"):
        trajectory_body(trajectory)


def test_a_truncated_body_is_damage_and_not_a_crash():
    body = trajectory_body(make_trajectory())
    for size in (0, 3, 20, len(body) - 1):
        with pytest.raises(LedgerError, match="damaged"):
            trajectory_from_body(body[:size])


def test_a_newer_layout_names_both_versions():
    body = trajectory_body(make_trajectory())
    with pytest.raises(LedgerError, match="version 9, this LongArc reads 1"):
        trajectory_from_body(b"\x09" + body[1:])


def test_a_blob_that_is_not_compressed_is_damage():
    with pytest.raises(LedgerError, match="damaged"):
        decompress(b"nothing")


def test_a_task_comes_back_equal():
    task = make_task(3)
    assert decode_task(encode_task(task)) == task


def test_a_step_report_comes_back_equal_even_with_a_number_json_lacks():
    report = make_report(make_batch([make_group([make_trajectory()])]))
    report = dataclasses.replace(report, metrics=(*report.metrics, Metric("loss/kl", math.inf)))
    assert decode_report(encode_report(report)) == report


def test_a_report_from_before_there_were_critics_is_read():
    report = make_report(make_batch([make_group([make_trajectory()])]))
    data = from_json(decompress(encode_report(report)))
    data["token_reports"] = [fields[:4] for fields in data["token_reports"]]
    (token_report,) = decode_report(compress(to_json(data))).token_reports
    assert token_report == dataclasses.replace(report.token_reports[0], values=())


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1},
        {"stage": "other"},
        {"trainer_version": 7},
        {"resets_optimizer": True},
        {"groups": ()},
    ],
)
def test_the_digest_of_a_batch_sees_every_field(change):
    batch = make_batch([make_group([make_trajectory()])])
    assert batch_sha256(dataclasses.replace(batch, **change)) != batch_sha256(batch)


def test_the_digest_of_a_batch_sees_multiplicities_and_single_tokens():
    one = make_trajectory(make_admission())
    token_ids = (1, *one.segments[0].token_ids[1:])
    digests = {
        batch_sha256(make_batch([make_group([one])])),
        batch_sha256(make_batch([make_group([one], [2])])),
        batch_sha256(make_batch([make_group([changed_segment(one, token_ids=token_ids)])])),
    }
    assert len(digests) == 3
