"""Scaled rotations: the formulas at points that can be worked out by hand, and what config.json may say of them."""

import json
import math

import pytest
import torch

from longarc.config.rope import LinearRope, Llama3Rope, YarnRope
from longarc.errors import ConfigError
from longarc.models.build import build_model
from longarc.models.hf_config import config_from_hf, config_to_hf
from longarc.models.layers import Rotation
from longarc.models.rope import amplitude, inverse_frequencies, latent_softmax_scale
from model_cases import YARN, small_glm, small_llama

WIDTH, BASE = 8, 16.0
PLAIN = [1.0, 0.5, 0.25, 0.125]  # 16^(-2i/8)


def frequencies(scaling):
    return inverse_frequencies(width=WIDTH, base=BASE, scaling=scaling).tolist()


def test_linear_scaling_divides_every_frequency():
    assert frequencies(None) == PLAIN
    assert frequencies(LinearRope(factor=4.0)) == [f / 4 for f in PLAIN]


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_mixes_between():
    # In 8 pi tokens the pairs turn 4, 2, 1 and 1/2 times; between 1 and 3 turns lies the ramp.
    scaling = Llama3Rope(
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=3.0,
        original_max_position_embeddings=25,  # 8 pi, nearly
    )
    turns = 25 * PLAIN[1] / (2 * math.pi)
    kept = (turns - 1) / 2
    mixed = kept * PLAIN[1] + (1 - kept) * PLAIN[1] / 4
    assert frequencies(scaling) == pytest.approx([1.0, mixed, 0.25 / 4, 0.125 / 4], rel=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_the_dimensions_that_turn_often_and_seldom(truncate):
    scaling = YarnRope(
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=4.0,
        beta_slow=0.5,
        truncate=truncate,
    )

    def dimension(turns):
        return 8 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(16))

    first, last = dimension(4.0), dimension(0.5)
    assert 1 < first < 2 < 4 < last < 5
    if truncate:
        first, last = 1, 5
    slowed = [min(max((i - first) / (last - first), 0), 1) for i in range(4)]
    expected = [f * (1 - s) + f / 4 * s for f, s in zip(PLAIN, slowed, strict=True)]
    assert frequencies(scaling) == pytest.approx(expected, rel=1e-6)


def test_the_amplitude_of_yarn_is_stated_or_follows_from_the_factor():
    shape = {"factor": math.e**10, "original_max_position_embeddings": 64}
    assert amplitude(None) == amplitude(LinearRope(factor=4.0)) == 1.0
    assert amplitude(YarnRope(**shape)) == pytest.approx(2.0)
    assert amplitude(YarnRope(**shape, attention_factor=1.5)) == 1.5
    both = YarnRope(**shape, mscale=3.0, mscale_all_dim=1.0)
    assert amplitude(both) == pytest.approx(4.0 / 2.0)
    assert amplitude(YarnRope(**shape, mscale=3.0)) == pytest.approx(
        2.0
    )  # read with the other alone
    assert latent_softmax_scale(16, both) == pytest.approx(0.25 * 2.0**2)
    assert latent_softmax_scale(16, YarnRope(**shape)) == 0.25


def test_the_amplitude_lengthens_what_is_turned():
    scaling = YarnRope(factor=2.0, original_max_position_embeddings=8, attention_factor=1.5)
    x = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(0))
    options = {"width": WIDTH, "base": BASE, "interleaved": False, "dtype": x.dtype}
    turned = Rotation(torch.arange(3), scaling=scaling, **options).apply(x)
    torch.testing.assert_close(turned.norm(dim=-1), 1.5 * x.norm(dim=-1))


SPELLINGS = {
    "new": lambda rope: {"rope_parameters": {"rope_theta": 500.0, **rope}},
    "old": lambda rope: {"rope_theta": 500.0, "rope_scaling": rope},
    "oldest": lambda rope: {
        "rope_theta": 500.0,
        "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in rope.items()},
    },
    "both": lambda rope: {
        "rope_theta": 500.0,
        "rope_scaling": rope,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3.0},
    },
}


def raw_of(config, **changes):
    raw = {k: v for k, v in config_to_hf(config, dtype="float32").items() if k != "rope_parameters"}
    return json.loads(json.dumps(raw | changes))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("base", [small_llama, small_glm])
@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, LinearRope(factor=2)),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 32},
            Llama3Rope(factor=8.0, original_max_position_embeddings=32),
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "attention_factor": None, "truncate": False},
            YarnRope(factor=2.0, original_max_position_embeddings=256, truncate=False),
        ),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
            YarnRope(factor=4.0, original_max_position_embeddings=64),
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn without factor"],
)
def test_every_spelling_of_a_scaling_is_read(spelling, base, rope, scaling):
    if spelling == "both" and rope["rope_type"] == "default":
        pytest.skip("an empty scaling does not go before anything")
    config = config_from_hf(raw_of(base(), **SPELLINGS[spelling](rope)))
    assert config.rope_scaling == scaling
    assert config.rope_theta == 500.0
    again = config_from_hf(json.loads(json.dumps(config_to_hf(config, dtype="float32"))))
    assert again == config


def test_the_context_of_yarn_is_the_stretched_one():
    """Qwen's model cards add YaRN to the file and leave max_position_embeddings as it was."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = config_from_hf(raw_of(small_llama(), rope_scaling=rope, rope_theta=1e6))
    assert config.max_position_embeddings == 1024
    wide = config_from_hf(
        raw_of(small_llama(), rope_scaling=rope, rope_theta=1e6, max_position_embeddings=4096)
    )
    assert wide.max_position_embeddings == 4096
    linear = config_from_hf(
        raw_of(small_llama(), rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=1e6)
    )
    assert linear.max_position_embeddings == 256


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            r"'dynamic'.*supported: 'default', 'linear', .*write that",
        ),
        ({"rope_type": "longrope"}, "'longrope'.*supported: .*table of factors"),
        ({"rope_type": "proportional"}, "'proportional'.*other numbers"),
        ({"rope_type": "linear"}, "(?s)linear scaling.*factor.*Field required"),
        (
            {"rope_type": "linear", "factor": 0.5},
            "(?s)linear scaling.*factor.*greater than or equal to 1",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1, 2]},
            "(?s)yarn scaling.*mrope_section",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            r"high_freq_factor=4.0 must be above low_freq_factor=4.0",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_type": "yarn"}, "rope_type": 3}, "rope_type '3'"),
    ],
)
def test_a_scaling_that_is_not_computed_exactly_is_refused(rope, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(raw_of(small_llama(), rope_parameters={"rope_theta": 1e4, **rope}))


def test_a_scaled_model_is_another_model():
    ids = torch.arange(40)
    states = []
    for scaling in (None, YARN):
        model = build_model(small_glm(rope_scaling=scaling), seed=1)
        cache = model.new_cache(1, 64)
        states.append(model.extend(ids, [0], [0], [40], cache))
    assert not torch.allclose(*states, atol=1e-3)
