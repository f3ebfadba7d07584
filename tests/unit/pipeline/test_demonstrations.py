from pathlib import Path

import pytest

from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.data.sft import ExpertShare
from longarc.envs.tasks.format import Format
from longarc.errors import ConfigError
from longarc.pipeline.demonstrations import StepConversations, interleaved, num_shown_before
from longarc.records.conversation import Conversation
from longarc.records.message import Message, Role
from longarc.tokens.glm import GlmFormat
from token_samples import small_tokenizer

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke.toml"


QUICKSTART = SMOKE.with_name("quickstart.toml")


def conversations(seed=0, first=0):
    return StepConversations(
        {"format": ExpertShare(expert=Format())},
        GlmFormat(small_tokenizer()),
        conversations_per_step=3,
        error_frac=0.0,
        max_tokens=500,
        first=first,
        seed=seed,
    )


def test_a_step_has_the_same_demonstrations_whatever_was_read_before():
    first, second = conversations(), conversations()
    expected = [first(step) for step in range(3)]
    assert second(2) == expected[2]
    assert second(0) == expected[0]
    assert expected[0] != expected[1]
    assert all(len(documents) == 3 for documents in expected)


class _Recorded:
    def demonstration(self, index, *, error_frac=0.0):
        return Conversation(messages=(Message(role=Role.USER, content="word " * 100),))

    def all_demonstrations(self):
        yield self.demonstration(0)


def test_recorded_conversations_that_are_too_long_are_found_before_the_first_step():
    with pytest.raises(ConfigError, match="1 of the 1 conversations of 'mine'"):
        StepConversations(
            {"mine": ExpertShare(expert=_Recorded())},
            GlmFormat(small_tokenizer()),
            conversations_per_step=1,
            error_frac=0.0,
            max_tokens=20,
            seed=0,
        )


def test_a_stage_that_shows_an_unknown_family_is_refused():
    override = "stages.pretrain.demonstrations={tasks={nosuch={}}}"
    with pytest.raises(ConfigError, match="nosuch"):
        load_settings(Recipe, SMOKE, overrides=[override])


def test_text_comes_every_nth_step_and_misses_none_of_its_own():
    steps = interleaved(
        lambda step: [f"text {step}"], lambda step: [f"demo {step}"], text_every_steps=3
    )
    assert [steps(i) for i in range(7)] == [
        ["text 0"],
        ["demo 1"],
        ["demo 2"],
        ["text 1"],
        ["demo 4"],
        ["demo 5"],
        ["text 2"],
    ]
    both = interleaved(
        lambda step: [f"text {step}"], lambda step: [f"demo {step}"], text_every_steps=1
    )
    assert both(5) == ["text 5", "demo 5"]


def test_no_stage_shows_what_an_earlier_one_showed():
    recipe = load_settings(Recipe, QUICKSTART)
    starts = [num_shown_before(recipe, stage) for stage in ("pretrain", "midtrain", "dsa", "sft")]
    midtrain, dsa = recipe.stages["midtrain"], recipe.stages["dsa"]
    shown = [
        0,
        midtrain.num_steps * midtrain.demonstrations.conversations_per_step,
        (dsa.warmup_steps + dsa.num_steps) * dsa.demonstrations.conversations_per_step,
    ]
    assert starts == [0, 0, shown[1], shown[1] + shown[2]]
    early, late = conversations(), conversations(first=6)
    assert late(0) == early(2)
