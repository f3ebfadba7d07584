"""Models in GGUF format: what is rewritten computes the same, and what does not fit is refused by name."""

import pytest
import torch

from gguf_cases import gguf_tensors, pairs_apart, settings_of, vocabulary, write_gguf
from longarc.errors import CheckpointError, ConfigError
from longarc.models.build import build_model
from longarc.models.gguf_file import GgufFile
from longarc.models.gguf_llama import convert_gguf, halves_together
from longarc.models.hf_weights import load_pretrained_dir
from longarc.models.layout import Layout
from model_cases import sharpened, small_llama

NUM_TOKENS = len(vocabulary())


@pytest.fixture(autouse=True)
def _library():
    pytest.importorskip("gguf")


def model_of(**changes):
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 96, "vocab_size": NUM_TOKENS}
    return sharpened(build_model(small_llama(**(shape | changes)), seed=4))


def written(tmp_path, model, *, settings=(), tensors=(), **options):
    path = tmp_path / "model.gguf"
    every = settings_of(model) | dict(settings)
    write_gguf(
        path,
        {name: value for name, value in every.items() if value is not None},
        {n: t for n, t in (gguf_tensors(model) | dict(tensors)).items() if t is not None},
        **options,
    )
    return path


def converted(tmp_path, path, **options):
    target = tmp_path / "out"
    target.mkdir()
    convert_gguf(GgufFile(path), target, **options)
    return load_pretrained_dir(target)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4, "rope_theta": 100.0}],
    ids=["plain", "tied", "a key head a head"],
)
def test_a_rewritten_model_is_the_one_that_was_written(changes, tmp_path):
    model = model_of(**changes)
    found = converted(tmp_path, written(tmp_path, model), max_shard_bytes=50_000)
    assert found.config == model.config
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert all(torch.equal(found.state_dict()[n], t) for n, t in model.state_dict().items())


def test_quantised_tensors_come_back_as_what_they_were_rounded_to(tmp_path):
    model = model_of()
    found = converted(tmp_path, written(tmp_path, model, kind="Q8_0"))
    for name, tensor in model.state_dict().items():
        step = tensor.abs().max() / 127
        assert (found.state_dict()[name] - tensor).abs().max() <= 0.51 * step, name
    ids = torch.arange(50)
    expected, hidden = (m(ids, Layout.documents([50])).hidden for m in (model, found))
    assert 0 < (hidden - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_rows_of_pairs_are_put_back():
    weight = torch.arange(24.0 * 3).view(24, 3)
    apart = torch.from_numpy(pairs_apart(weight.numpy(), 2).copy())
    assert not torch.equal(apart, weight)
    assert apart[:2, 0].tolist() == [weight[0, 0].item(), weight[6, 0].item()]
    assert torch.equal(halves_together(apart, num_heads=2), weight)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no file"):
        GgufFile(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to have a header")
    with pytest.raises(CheckpointError, match=r"text.gguf is not a whole GGUF file; copy it again"):
        GgufFile(tmp_path / "text.gguf")
    path = written(tmp_path, model_of())
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        GgufFile(path)


SHAPE = [[64, 64], [32, 64]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensors": {"blk.1.attn_k.weight": None}},
            r"lacks tensor 'blk.1.attn_k.weight' of shape \[32, 64\].*'model.layers.1.self_attn.k_proj",
        ),
        (
            {"tensors": {"blk.0.attn_q.weight": torch.zeros(32, 64).numpy()}},
            r"'blk.0.attn_q.weight' .*has shape \[32, 64\].* ask for \[64, 64\]",
        ),
        (
            {"tensors": {"blk.0.attn_q.bias": torch.zeros(64).numpy()}},
            r"1 tensors that a plain Llama does not have, .*'blk.0.attn_q.bias' of shape \[64\]",
        ),
        ({"tensors": {"rope_freqs.weight": torch.ones(8).numpy()}}, "scales its rotations"),
        ({"settings": {"llama.rope.scaling.type": "yarn"}}, "scales its rotations .*='yarn'"),
        ({"settings": {"llama.rope.dimension_count": 8}}, "dimension_count=8 .*16 wide"),
        ({"settings": {"llama.block_count": None}}, "has no setting 'llama.block_count'"),
        ({"settings": {"llama.block_count": "two"}}, "'llama.block_count' .*'two', a str; .*int"),
        ({"settings": {"llama.attention.head_count_kv": 3}}, "(?s)describe no model.*=3"),
        ({"architecture": "gemma"}, "architecture 'gemma'; only 'llama'"),
    ],
)
def test_a_file_of_another_model_is_refused_before_anything_is_written(changes, message, tmp_path):
    path = written(tmp_path, model_of(), **changes)
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path, path)
    assert not list((tmp_path / "out").iterdir())


def test_without_the_library_the_fix_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'longarc\[gguf\]'"):
        GgufFile(tmp_path / "model.gguf")
