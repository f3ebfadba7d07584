"""Golden context management: what is folded, and from which length on everything is discarded."""

import json
from pathlib import Path

import pytest

from longarc.envs.context import FOLDED, folded, must_discard
from longarc.records.message import Role
from token_samples import assistant, call, tool, user

DATA = json.loads((Path(__file__).parent / "data" / "context_management.json").read_text())


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in DATA["cases"]])
def test_old_observations_are_folded_as_recorded(case):
    k, seen = case["k"], case["observations_in"]
    conversation = [user("task")]
    for number, text in enumerate(seen):
        answer = assistant("go", reasoning="why", calls=(call("f", call_id=f"c{number}"),))
        conversation += [answer, tool(text, call_id=f"c{number}")]
    shown = folded(conversation, num_opening=1, keep_recent=k)
    observations = [m.content for m in shown if m.role is Role.TOOL]
    assert len(seen) == case["rounds"]
    assert observations == case["observations_out"]
    assert observations.count(FOLDED) == case["folded"]
    assert [m for m in shown if m.role is not Role.TOOL] == [
        m for m in conversation if m.role is not Role.TOOL
    ], "reasoning and actions are kept"


@pytest.mark.parametrize("case", DATA["meta"]["hcm_threshold"])
def test_all_history_goes_above_the_threshold_and_not_at_it(case):
    assert must_discard(case["total_tokens"], above_tokens=case["T"]) is case["discard_all"]
