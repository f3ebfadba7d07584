"""Where templates are found, and that a run's copy is the same."""

import datetime
import json

import pytest

from longarc.errors import ConfigError
from longarc.tokens.formats import make_chat_format
from longarc.tokens.template_source import TemplateSource
from template_cases import GROWING
from token_samples import qwen_tokenizer, user

CONFIG = {
    "chat_template": GROWING,
    "eos_token": {"content": "<|endoftext|>"},
    "bos_token": None,
    "unk_token": "<unk>",
    "model_max_length": 9,
}


def read(path, **options):
    return TemplateSource.read(path, **{"values": {}, "date": None, **options})


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_template_stands_in_the_tokenizers_config(checkpoint):
    for path in (checkpoint, checkpoint / "tokenizer_config.json"):
        source = read(path)
        assert source.template == GROWING
        assert source.special_tokens == {"eos_token": "<|endoftext|>", "unk_token": "<unk>"}


def test_a_jinja_file_comes_first_and_special_tokens_from_beside_it(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("jinja")
    (checkpoint / "other.jinja").write_text("other")
    assert read(checkpoint).template == "jinja"
    other = read(checkpoint / "other.jinja")
    assert (other.template, other.special_tokens["eos_token"]) == ("other", "<|endoftext|>")


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read(tmp_path).template == "d"


@pytest.mark.parametrize("content", [None, "{}", '{"chat_template": null}', "[", "[1]"])
def test_no_template_is_an_error_that_says_where_one_was_looked_for(tmp_path, content):
    path = tmp_path / "tokenizer_config.json"
    if content is not None:
        path.write_text(content)
    for place in (tmp_path, path, tmp_path / "no.jinja"):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            read(place)


def test_the_copy_of_a_run_says_the_same(checkpoint, tmp_path):
    source = read(checkpoint, values={"a": [1]}, date=datetime.date(2026, 2, 24))
    source.save(tmp_path / "copy.json")
    assert TemplateSource.load(tmp_path / "copy.json") == source
    undated = read(checkpoint)
    undated.save(tmp_path / "copy.json")
    assert TemplateSource.load(tmp_path / "copy.json") == undated


def test_a_damaged_copy_is_an_error(tmp_path):
    (tmp_path / "copy.json").write_text('{"template": "x"}')
    with pytest.raises(ConfigError, match="cannot read the run's chat template"):
        TemplateSource.load(tmp_path / "copy.json")


def test_a_source_becomes_a_format(checkpoint):
    tokenizer = qwen_tokenizer()
    chat_format = make_chat_format("template", tokenizer, template=read(checkpoint))
    assert tokenizer.special_id("<|endoftext|>") in chat_format.stop_ids
    assert chat_format.render([user("q")], thinking=True, add_generation_prompt=True).token_ids
