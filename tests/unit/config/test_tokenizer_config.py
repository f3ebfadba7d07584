"""Which chat formats a recipe may name, and when template settings mean something."""

import datetime

import pytest
from pydantic import ValidationError

from longarc.config.format_names import FORMAT_NAMES
from longarc.config.tokenizer import TokenizerConfig


@pytest.mark.parametrize("name", [*FORMAT_NAMES, "my.formats:Own"])
def test_a_format_is_named_or_imported(name):
    assert TokenizerConfig(chat_format=name, path="t/tokenizer.json").chat_format == name


@pytest.mark.parametrize("name", ["glm5", "ChatML", "mod:", ":name", ""])
def test_another_name_is_refused_with_what_there_is(name):
    with pytest.raises(ValidationError, match="there is no chat format"):
        TokenizerConfig(chat_format=name)


def test_a_near_miss_is_named():
    with pytest.raises(ValidationError, match="did you mean 'glm-5'"):
        TokenizerConfig(chat_format="glm5")


@pytest.mark.parametrize(
    "given",
    [
        {"template": "t.jinja"},
        {"template_values": {"a": 1}},
        {"template_date": datetime.date(2026, 1, 1)},
    ],
)
def test_template_settings_without_a_template_are_refused(given):
    with pytest.raises(ValidationError, match="reads no template"):
        TokenizerConfig(**given)


def test_a_template_has_to_come_from_somewhere():
    with pytest.raises(ValidationError, match="needs a template"):
        TokenizerConfig(chat_format="template")
