"""Logits of random Llama, Qwen2 and Qwen3 models against transformers' own: one pass, packed, and by pieces."""

import json
import random

import pytest
import torch
import torch.nn.functional as F

from longarc.config.model import LlamaConfig
from longarc.config.rope import LinearRope, Llama3Rope, YarnRope
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from model_cases import YARN, replay_in_random_company, small_llama

TOLERANCE = 2e-5
KINDS = {
    "llama": {"attention_bias": "none"},
    "llama with biases": {"attention_bias": "all"},
    "qwen2": {"attention_bias": "inputs"},
    "qwen3": {"qk_norm": True},
    "qwen3 with biases": {"qk_norm": True, "attention_bias": "all"},
}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def random_scaling(rng: random.Random):
    factor, original = rng.choice([1.0, 2.0, 4.0, 8.0]), rng.choice([8, 24, 48])
    match rng.randrange(6):
        case 0 | 1:
            return None
        case 2:
            return LinearRope(factor=factor)
        case 3:
            return Llama3Rope(
                factor=factor,
                low_freq_factor=rng.choice([0.5, 1.0]),
                high_freq_factor=rng.choice([2.0, 4.0]),
                original_max_position_embeddings=original,
            )
        case _:
            weights = rng.choice([{}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale": 0.5}])
            return YarnRope(
                factor=factor,
                original_max_position_embeddings=original,
                attention_factor=rng.choice([None, None, 1.25]),
                beta_fast=rng.choice([32.0, 4.0]),
                beta_slow=rng.choice([1.0, 0.5]),
                truncate=rng.random() < 0.5,
                **weights,
            )


def random_config(rng: random.Random, **kind) -> LlamaConfig:
    keys, group = rng.randint(1, 3), rng.randint(1, 4)
    width = rng.choice([4, 16, 20])  # none that hidden_size / num_attention_heads can be
    return LlamaConfig(
        vocab_size=64,
        # transformers' Llama wants a multiple of the heads even where it has a head_dim
        hidden_size=keys * group * rng.choice([8, 12]),
        num_hidden_layers=rng.randint(1, 3),
        num_attention_heads=keys * group,
        num_key_value_heads=keys,
        head_dim=rng.choice([None, width]),
        intermediate_size=rng.choice([16, 48]),
        rope_theta=rng.choice([100.0, 1e4, 1e6]),
        rope_scaling=random_scaling(rng),
        rms_norm_eps=rng.choice([1e-6, 1e-5]),
        tie_word_embeddings=rng.random() < 0.5,
        max_position_embeddings=512,
        **kind,
    )


def spread(model, seed: int):
    """Draw every parameter, so that biases and norms matter and logits are of the size of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
            else:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.normal_(mean=centre, std=0.3, generator=generator)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_transformers_in_one_pass_and_by_pieces(kind, seed, tmp_path):
    transformers = pytest.importorskip("transformers")
    rng = random.Random(f"{kind} {seed}")
    ours = spread(build_model(random_config(rng, **KINDS[kind]), seed=seed), seed)
    save_pretrained_dir(ours, tmp_path)
    model_type = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert model_type == kind.partition(" ")[0]
    cls = getattr(transformers, CLASSES[model_type])
    reference = cls.from_pretrained(tmp_path, local_files_only=True).eval()
    lengths = [rng.randint(1, 80) for _ in range(3)]
    layout = Layout.documents(lengths)
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(seed))

    with torch.no_grad():
        documents = ids.split(lengths)
        expected = torch.cat([reference(document[None]).logits[0] for document in documents])
        packed = project_logits(ours(ids, layout).hidden, ours.output_weight)
        pieces = torch.cat(replay_in_random_company(ours, documents, seed=seed))
    assert expected.std() > 0.3
    torch.testing.assert_close(packed, expected, rtol=0, atol=TOLERANCE)
    by_pieces = project_logits(pieces, ours.output_weight)
    torch.testing.assert_close(by_pieces, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["native", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_transformers(kind, path, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if path == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")
    config = small_llama(rope_scaling=YARN, tie_word_embeddings=True, **KINDS[kind])
    ours = spread(build_model(config, seed=1), 1)
    save_pretrained_dir(ours, tmp_path)
    cls = getattr(transformers, CLASSES[kind.partition(" ")[0]])
    reference = cls.from_pretrained(tmp_path, local_files_only=True)
    ids, targets = torch.randint(0, 64, (2, 50), generator=torch.Generator().manual_seed(1))
    hidden = ours(ids, Layout.documents([50])).hidden
    F.cross_entropy(project_logits(hidden, ours.output_weight), targets).backward()
    F.cross_entropy(reference(ids[None]).logits[0], targets).backward()
    theirs = dict(reference.named_parameters())
    assert theirs.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=2e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_transformers_comes_back_as_it_was(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    rng = random.Random(kind)
    config = random_config(rng, **KINDS[kind])
    save_pretrained_dir(build_model(config, seed=1), tmp_path / "config")
    model_type = kind.partition(" ")[0]
    cls = getattr(transformers, CLASSES[model_type])
    settings = cls.config_class.from_pretrained(tmp_path / "config", local_files_only=True)
    reference = spread(cls(settings), 3).eval()
    reference.save_pretrained(tmp_path / "theirs")

    ours = load_pretrained_dir(tmp_path / "theirs")
    assert ours.config == config
    save_pretrained_dir(ours, tmp_path / "ours")
    again = cls.from_pretrained(tmp_path / "ours", local_files_only=True).eval()
    ids = torch.arange(60) % 64
    with torch.no_grad():
        theirs = reference(ids[None]).logits[0]
        logits = project_logits(ours(ids, Layout.documents([60])).hidden, ours.output_weight)
        assert torch.equal(again(ids[None]).logits[0], theirs)
    torch.testing.assert_close(logits, theirs, rtol=0, atol=TOLERANCE)
