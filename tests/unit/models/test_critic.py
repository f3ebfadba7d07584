"""A decoder with a value head: what it computes, what it keeps of the policy, and its file."""

import pytest
import torch

import transformers_cases
from longarc.config.model import AttentionPattern
from longarc.errors import CheckpointError
from longarc.models.build import build_model
from longarc.models.conversion import to_hybrid
from longarc.models.critic import Critic, build_critic, load_critic, save_critic
from longarc.models.hf_weights import save_weights
from longarc.models.layout import Layout
from model_cases import small_glm, small_llama, small_qwen

IDS = torch.arange(1, 31)
LAYOUT = Layout.documents([20, 10])
ROWS = torch.tensor([0, 19, 19, 29])


def configs():
    yield pytest.param(small_glm(), id="glm_moe_dsa")
    yield pytest.param(small_glm(num_nextn_predict_layers=1), id="glm_moe_dsa with drafts")
    yield pytest.param(small_llama(), id="llama")
    yield pytest.param(small_qwen(), id="qwen")
    for family in transformers_cases.FAMILIES:
        yield pytest.param(transformers_cases.small(family), id=family)


def drawn_head(critic):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in critic.value_head.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return critic


def critic_of(config, *, seed=3, dtype=torch.float32):
    return drawn_head(Critic(build_model(config, seed=seed, dtype=dtype)))


@pytest.mark.parametrize("config", list(configs()))
def test_the_value_of_a_row_is_the_heads_product_with_the_policys_own_state(config):
    policy = build_model(config, seed=3)
    hidden = policy(IDS, LAYOUT, attention="dense").hidden.detach()
    critic = critic_of(config)
    values = critic(IDS, LAYOUT, ROWS, attention="dense")
    weight, bias = critic.value_head.weight[0], critic.value_head.bias
    torch.testing.assert_close(values, hidden[ROWS] @ weight + bias, rtol=1e-5, atol=1e-6)
    assert values[1] == values[2]


@pytest.mark.parametrize("config", list(configs()))
def test_a_new_critic_expects_nothing_and_has_no_parts_it_does_not_need(config):
    critic = Critic(build_model(config, seed=3))
    assert not critic(IDS, LAYOUT, ROWS, attention="dense").any()
    names = dict(critic.named_parameters())
    assert not any("lm_head" in name or ".mtp." in name for name in names)
    assert "value_head.weight" in names


@pytest.mark.parametrize("config", list(configs()))
def test_a_critic_is_saved_and_loaded_whole(config, tmp_path):
    critic = critic_of(config)
    save_critic(critic, tmp_path / "critic.safetensors")
    other = build_critic(config)
    load_critic(other, tmp_path / "critic.safetensors")
    state = critic.state_dict()
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())


def test_a_critic_on_a_hybrid_backbone_learns():
    model = build_model(small_glm(num_hidden_layers=2), seed=0)
    pattern = AttentionPattern(layers="FG")
    critic = Critic(to_hybrid(model, pattern))
    (critic(IDS, LAYOUT, ROWS, attention="dense") - 1).square().sum().backward()
    assert critic.value_head.bias.grad.abs().item() > 0


def test_gradients_reach_the_backbone_through_the_head():
    critic = critic_of(small_glm())
    critic(IDS, LAYOUT, ROWS, attention="sparse").sum().backward()
    reached = {n for n, p in critic.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("experts" in name for name in reached)
    assert any("self_attn" in name for name in reached)


def test_a_head_on_a_bfloat16_backbone_computes_in_fp32():
    critic = critic_of(small_llama(), dtype=torch.bfloat16)
    values = critic(IDS, LAYOUT, ROWS, attention="dense")
    assert values.dtype == torch.float32
    assert critic.dtype == torch.bfloat16


def test_a_policys_file_is_no_critic(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(build_model(small_glm(), seed=0), path)
    with pytest.raises(CheckpointError, match="the weights of a policy, not of a critic"):
        load_critic(build_critic(small_glm()), path)


def test_a_critic_of_another_shape_is_refused_and_nothing_is_loaded(tmp_path):
    path = tmp_path / "critic.safetensors"
    save_critic(critic_of(small_llama(num_hidden_layers=1)), path)
    critic = build_critic(small_llama(num_hidden_layers=2))
    before = {name: value.clone() for name, value in critic.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"lacks .* tensors of this model"):
        load_critic(critic, path)
    assert all(torch.equal(before[name], value) for name, value in critic.state_dict().items())
