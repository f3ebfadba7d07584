import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from atif_rules import broken_rules
from ledger_cases import make_admission, make_batch, make_group, make_report, make_trajectory
from longarc.records.constraint import ConstrainedSpan, Constraint
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.outcome import Disposition
from longarc.records.segment import Segment, SegmentKind
from longarc.records.trajectory import Trajectory
from longarc.records.turn import Turn
from longarc.runs.atif import trajectory_to_atif
from longarc.runs.atif_import import trajectories_from_atif
from longarc.runs.codec import trajectory_body, trajectory_from_body
from longarc.runs.ledger import Ledger
from longarc.runs.record_json import to_json_line, trajectory_from_json, trajectory_to_json

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Hundreds of ledgers are made here; what is tested does not depend on a disk."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(), json_values, max_size=4)


def any_span(length):
    constraint = st.builds(
        Constraint,
        json_schema=st.text(),
        reasoning=st.sampled_from(["none", "open", "optional"]),
        allows_calls=st.booleans(),
        tags_by_id=st.booleans(),
    )
    return st.builds(
        ConstrainedSpan,
        start=st.integers(0, length // 2),
        stop=st.integers(length // 2, length),
        constraint=constraint,
        stop_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    )


@st.composite
def any_segment(draw):
    length = draw(st.integers(0, 40))
    sampled = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    trained = [s and draw(st.booleans()) for s in sampled]
    token_ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length))
    # What a token was drawn from holds the token itself.
    kept = [
        (i, draw(st.integers(0, 99))) if s and draw(st.booleans()) else ()
        for i, s in zip(token_ids, sampled, strict=True)
    ]
    exact = st.floats(max_value=0, allow_nan=False, width=draw(st.sampled_from([32, 64])))
    return Segment(
        token_ids=tuple(token_ids),
        is_sampled=tuple(sampled),
        train_mask=tuple(trained),
        behaviour_logprobs=tuple(draw(exact) if s else 0.0 for s in sampled),
        policy_versions=tuple(draw(st.integers(0, 2**40)) if s else -1 for s in sampled),
        kept_ids=draw(st.sampled_from([None, tuple(kept)])),
        constraints=draw(st.just(()) | st.tuples(any_span(length))),
        routing=draw(st.none() | st.tuples(*[st.binary(max_size=5)] * length)),
        kind=draw(st.sampled_from(list(SegmentKind))),
        order=draw(st.integers(0, 9)),
        parent=draw(st.none() | st.integers(0, 9)),
        agent_id=draw(st.text()),
        parent_agent_id=draw(st.none() | st.text()),
        window=draw(st.integers(0, 9)),
    )


messages = st.builds(
    Message,
    role=st.sampled_from(list(Role)),
    content=st.text(),
    reasoning=st.none() | st.text(),
    tool_calls=st.lists(
        st.builds(
            ToolCall, id=st.text(), name=st.text(), arguments=objects, error=st.none() | st.text()
        ),
        max_size=2,
    ).map(tuple),
    tool_call_id=st.none() | st.text(),
)


tools = st.lists(
    st.builds(ToolSpec, name=st.text(), description=st.text(), parameters=objects), max_size=2
).map(tuple)


@st.composite
def any_turns(draw):
    return tuple(
        Turn(
            segment_order=draw(st.integers(0, 9)),
            start=draw(st.integers(0, 99)),
            num_sampled=draw(st.integers(0, 99)),
            parent=draw(st.none() | st.integers(0, position - 1)) if position else None,
            said=draw(st.lists(messages, max_size=2).map(tuple)),
            answer=draw(messages),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
            elapsed_s=draw(st.floats(0, 1e9)),
            tools=draw(tools),
        )
        for position in range(draw(st.integers(0, 3)))
    )


@st.composite
def any_trajectory(draw):
    base = make_trajectory(make_admission(0, draw(st.integers(0, 3))))
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    fields |= {
        "segments": tuple(draw(st.lists(any_segment(), max_size=3))),
        "messages": tuple(draw(st.lists(messages, max_size=3))),
        "info": draw(objects),
        "turns": draw(any_turns()),
        "reward": draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        "error": draw(st.none() | st.text()),
    }
    return Trajectory(**fields)


@given(any_trajectory(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_trajectory_is_a_valid_atif_document_that_comes_back_equal(trajectory, is_lean):
    document = trajectory_to_atif(trajectory, with_prompt_ids=not is_lean)
    assert broken_rules(document) == []
    line = to_json_line(document)
    line.encode("ascii")
    assert trajectories_from_atif(json.loads(line), name="x") == (trajectory,)


@given(any_trajectory())
@settings(max_examples=100, deadline=None)
def test_every_trajectory_comes_back_equal_and_with_the_same_bytes(trajectory):
    body = trajectory_body(trajectory)
    back = trajectory_from_body(body)
    assert back == trajectory
    assert trajectory_body(back) == body
    assert (
        trajectory_from_json(json.loads(to_json_line(trajectory_to_json(trajectory)))) == trajectory
    )


@given(
    multiplicities=st.lists(
        st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    trainer_version=st.integers(0, 5),
    stranger=any_trajectory(),
)
@settings(max_examples=25, deadline=None)
def test_a_batch_is_rebuilt_exactly_and_audits_clean(multiplicities, trainer_version, stranger):
    with (
        TemporaryDirectory(dir=IN_MEMORY) as directory,
        Ledger.open(Path(directory) / "ledger.sqlite") as ledger,
    ):
        groups = []
        for index, counts in enumerate(multiplicities):
            admissions = [make_admission(index, member) for member in range(len(counts))]
            trajectories = [make_trajectory(admission) for admission in admissions]
            if index == 0:
                # One member of arbitrary content, under the identity that was admitted.
                known = {"id": trajectories[0].id}
                fields = {n: getattr(stranger, n) for n in stranger.__dataclass_fields__}
                trajectories[0] = Trajectory(**(fields | known))
            ledger.admit(admissions)
            for trajectory in trajectories:
                ledger.complete(trajectory)
            groups.append(make_group(trajectories, counts))
        batch = make_batch(groups, trainer_version=trainer_version)
        ledger.commit_step(batch, make_report(batch))
        assert ledger.batch("rl", 0) == batch
        newest = max(
            (r.newest_version for r in ledger.rows() if r.newest_version is not None), default=0
        )
        findings = ledger.audit().findings
        assert all("with weights of version" in finding for finding in findings)
        assert bool(findings) == (newest > trainer_version)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_whatever_the_crashes_every_place_ends_trained_exactly_once(crash_points):
    """A stage of four groups of two, cut off at any point, again and again."""
    with TemporaryDirectory(dir=IN_MEMORY) as directory:
        path = Path(directory) / "ledger.sqlite"
        plan = itertools.chain(crash_points, itertools.repeat(1000))
        while not _attempt(path, budget=next(plan)):
            pass
        with Ledger.open(path) as ledger:
            assert ledger.audit().findings == ()
            trained = ledger.rows(disposition=Disposition.TRAINED)
            assert sorted(row.id.split("/")[1:3] for row in trained) == sorted(
                [str(g), str(m)] for g in range(4) for m in range(2)
            )


def _attempt(path, *, budget):
    """Run the stage for ``budget`` ledger calls after recovery; True when it is over."""
    with Ledger.open(path) as ledger:
        again = [
            make_admission(a.group_index, a.member_index, attempt=a.attempt + 1)
            for a in ledger.cancel_open("rl")
        ]
        if budget == 0:
            return False  # a crash between the two halves of recovery
        ledger.admit(again)
        for action in _todo(ledger):
            budget -= 1
            if budget == 0:
                return False
            action()
    return True


def _todo(ledger):
    while True:
        waiting = ledger.open_admissions("rl")
        pending = ledger.pending("rl")
        groups = {t.group_id: [u for u in pending if u.group_id == t.group_id] for t in pending}
        ready = [members for members in groups.values() if len(members) == 2]
        if ready:
            batch = make_batch([make_group(ready[0])], step=len(ledger.steps("rl")))
            yield lambda batch=batch: ledger.commit_step(batch, make_report(batch))
        elif waiting:
            yield lambda waiting=waiting: ledger.complete(make_trajectory(waiting[-1]))
        elif ledger.num_groups_admitted("rl") < 4:
            index = ledger.num_groups_admitted("rl")
            yield lambda index=index: ledger.admit([make_admission(index, m) for m in range(2)])
        else:
            return
