"""Harbor's own models read what is exported, and what they write again comes back equal.

The package ``harbor`` needs Python 3.12 and much else; its models need pydantic alone, so they may be put on the
path by themselves.
"""

import json

import pytest

from ledger_cases import make_trajectory
from longarc.runs.atif import trajectory_to_atif
from longarc.runs.atif_import import trajectories_from_atif
from longarc.runs.record_json import to_json_line

harbor = pytest.importorskip("harbor.models.trajectories", reason="harbor cannot be imported")
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("with_prompt_ids", [True, False])
def test_harbor_reads_and_writes_our_documents(with_prompt_ids):
    trajectory = make_trajectory(num_segments=2, length=37)
    document = trajectory_to_atif(trajectory, with_prompt_ids=with_prompt_ids)
    read = harbor.Trajectory.model_validate_json(to_json_line(document))
    written = json.loads(json.dumps(read.to_json_dict()))
    assert trajectories_from_atif(written, name="x") == (trajectory,)


def test_we_read_what_harbor_writes():
    step = harbor.Step(
        step_id=1,
        source="agent",
        message="hello",
        metrics=harbor.Metrics(prompt_token_ids=[1, 2], completion_token_ids=[3], logprobs=[-0.5]),
    )
    agent = harbor.Agent(name="terminus-2", version="2.0")
    document = harbor.Trajectory(agent=agent, steps=[step], trajectory_id="t").to_json_dict()
    (read,) = trajectories_from_atif(document, name="x")
    assert read.segments[0].token_ids == (1, 2, 3)
    assert read.messages[0].content == "hello"
