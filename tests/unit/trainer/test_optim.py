"""Muon Split beside AdamW: who updates what, by exactly how much, and what is never touched."""

import math

import pytest
import torch
from torch import nn
from trainer_fixtures import TINY, TINY_LLAMA, tiny_model

from longarc.config.model import AttentionPattern
from longarc.config.training import OptimizerConfig
from longarc.errors import CheckpointError, ContractError
from longarc.models.conversion import to_hybrid
from longarc.models.critic import Critic
from longarc.trainer.muon import iteration_dtype, orthogonalise, update_scale
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.optim_rules import AdamWRule, MuonRule, parameter_rule

PLAIN = AdamWRule(is_decayed=False, is_embedding=False)
DECAYED = AdamWRule(is_decayed=True, is_embedding=False)
EMBEDDING = AdamWRule(is_decayed=False, is_embedding=True)
LAYER = "model.layers.1."

RULES = {
    "model.embed_tokens.weight": EMBEDDING,
    "lm_head.weight": EMBEDDING,
    "model.norm.weight": PLAIN,
    LAYER + "input_layernorm.weight": PLAIN,
    LAYER + "self_attn.q_a_proj.weight": MuonRule(num_blocks=1, rows=(16,)),
    LAYER + "self_attn.q_b_proj.weight": MuonRule(num_blocks=2, rows=(12,)),
    LAYER + "self_attn.kv_b_proj.weight": MuonRule(num_blocks=2, rows=(8, 8)),
    LAYER + "self_attn.o_proj.weight": MuonRule(num_blocks=1, rows=(32,)),
    LAYER + "self_attn.indexer.wk.weight": DECAYED,
    LAYER + "self_attn.indexer.k_norm.bias": PLAIN,
    LAYER + "mlp.gate.weight": DECAYED,
    LAYER + "mlp.experts.gate_up_proj": MuonRule(num_blocks=4, rows=(16, 16)),
    LAYER + "mlp.experts.down_proj": MuonRule(num_blocks=4, rows=(32,)),
    LAYER + "mlp.shared_experts.down_proj.weight": MuonRule(num_blocks=1, rows=(32,)),
}


@pytest.mark.parametrize("name", RULES)
def test_each_kind_of_parameter_has_its_rule(name):
    shape = tuple(tiny_model().get_parameter(name).shape)
    assert parameter_rule(name, shape, TINY, use_muon=True) == RULES[name]


def test_a_critic_keeps_the_rules_of_its_backbone_and_the_scale_of_its_head():
    for name, parameter in Critic(tiny_model()).named_parameters():
        rule = parameter_rule(name, tuple(parameter.shape), TINY, use_muon=True)
        own = name.removeprefix("backbone.")
        assert rule == RULES.get(own, rule)
        if name == "value_head.weight":
            assert rule == DECAYED


DELTA = LAYER + "self_attn.delta."
DELTA_RULES = {
    LAYER + "self_attn.q_b_proj.weight": MuonRule(num_blocks=2, rows=(12,)),
    DELTA + "conv_weight": DECAYED,
    DELTA + "a_proj.weight": DECAYED,
    DELTA + "b_proj.weight": DECAYED,
    DELTA + "g_proj.weight": MuonRule(num_blocks=1, rows=(16,)),
    DELTA + "a_log": PLAIN,
    DELTA + "dt_bias": PLAIN,
    DELTA + "o_norm.weight": PLAIN,
}


@pytest.mark.parametrize("name", DELTA_RULES)
def test_gates_and_convolutions_of_linear_attention_are_left_to_adamw(name):
    model = to_hybrid(tiny_model(), AttentionPattern(layers="FG"))
    shape = tuple(model.get_parameter(name).shape)
    assert parameter_rule(name, shape, model.config, use_muon=True) == DELTA_RULES[name]


def test_a_dense_model_splits_nothing_and_adamw_alone_takes_everything():
    name = "model.layers.0.self_attn.q_proj.weight"
    assert parameter_rule(name, (24, 24), TINY_LLAMA, use_muon=True) == MuonRule(
        num_blocks=1, rows=(24,)
    )
    assert parameter_rule(name, (24, 24), TINY_LLAMA, use_muon=False) == DECAYED


def test_a_shape_that_is_not_the_config_is_refused():
    with pytest.raises(ContractError, match="2 blocks of"):
        parameter_rule(LAYER + "self_attn.q_b_proj.weight", (25, 16), TINY, use_muon=True)


def newton_schulz(update):
    """The iteration as the papers print it, for one matrix."""
    x = update / max(update.norm().item(), 1e-7)
    x = x.mT if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if update.shape[0] > update.shape[1] else x


@pytest.mark.parametrize("shape", [(7, 5, 9), (7, 9, 5), (40, 64, 64)])
def test_matrices_are_orthogonalised_each_by_itself(shape):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = orthogonalise(matrices)
    torch.testing.assert_close(out, torch.stack([newton_schulz(m) for m in matrices]))
    singular_values = torch.linalg.svdvals(out)
    assert singular_values.max() < 1.3


def test_a_zero_matrix_stays_zero():
    assert not orthogonalise(torch.zeros(1, 3, 4)).any()


def test_a_gpu_iterates_in_bf16_and_a_cpu_in_what_it_is_given():
    assert iteration_dtype("cuda", torch.float32) == torch.bfloat16
    assert iteration_dtype("cpu", torch.float64) == torch.float64


def test_a_recipe_may_choose_what_the_iteration_computes_in():
    assert iteration_dtype("cpu", torch.float32, "bfloat16") == torch.bfloat16
    assert iteration_dtype("cuda", torch.float32, "float32") == torch.float32
    assert iteration_dtype("cuda", torch.bfloat16, "float32") == torch.float32


def test_updates_in_bf16_are_those_of_fp32_but_for_their_rounding():
    updated = {}
    for dtype in ("auto", "float32", "bfloat16"):
        model = tiny_model(seed=0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        config = OptimizerConfig(lr=0.1, weight_decay=0.0, muon_dtype=dtype)
        optimizer = MuonAdamW(model, model.config, config)
        generator = torch.Generator().manual_seed(4)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(0.1)
        updated[dtype] = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    for name, exact in updated["float32"].items():
        assert torch.equal(updated["auto"][name], exact)
        difference = (updated["bfloat16"][name] - exact).norm()
        assert difference <= 0.05 * exact.norm()
    assert any(not torch.equal(updated["bfloat16"][n], e) for n, e in updated["float32"].items())


@pytest.mark.parametrize("shape", [(5, 16, 64), (3, 64, 48)])
def test_bf16_comes_as_near_as_torch_does(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    single = nn.Parameter(torch.zeros(shape[1:]))
    muon = torch.optim.Muon(
        [single],
        lr=1.0 / update_scale(*single.shape),
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    exact = orthogonalise(matrices)
    for matrix, ours, expected in zip(
        matrices, orthogonalise(matrices.bfloat16()).float(), exact, strict=True
    ):
        with torch.no_grad():
            single.zero_()
        single.grad = matrix
        muon.step()
        theirs = -single.detach()
        assert (ours - expected).norm() < 1.5 * (theirs - expected).norm()


def gradients(model, *, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(
                parameter.shape, dtype=parameter.dtype, generator=generator
            )


def test_two_steps_follow_the_formula_for_a_split_projection():
    model = tiny_model(dtype=torch.float64)
    config = OptimizerConfig(lr=0.1, weight_decay=0.1)
    optimizer = MuonAdamW(model, TINY, config)
    weight = model.get_parameter(LAYER + "self_attn.kv_b_proj.weight")
    expected, momentum = weight.detach().clone(), torch.zeros_like(weight)
    for step, lr in enumerate((0.1, 0.05)):
        gradients(model, seed=step)
        momentum = 0.95 * momentum + weight.grad
        update = weight.grad + 0.95 * momentum
        for start in (0, 8, 16, 24):  # two heads of a key part and a value part, each [8, 8]
            block = slice(start, start + 8)
            expected[block] *= 1 - lr * 0.1
            expected[block] -= lr * 0.2 * math.sqrt(8) * newton_schulz(update[block])
        optimizer.step(lr)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(48, 20), (20, 48), (32, 32)], ids=["tall", "wide", "square"])
def test_steps_are_those_of_torch_with_its_scale_for_adamw(shape):
    """Up to torch's rounding, which iterates in bf16 on every device."""
    ours, theirs = nn.Module(), nn.Module()
    start = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for module in (ours, theirs):
        module.weight = nn.Parameter(start.clone())
    optimizer = MuonAdamW(ours, TINY_LLAMA, OptimizerConfig(weight_decay=0.3))
    reference = torch.optim.Muon(
        theirs.parameters(),
        lr=0.05,
        weight_decay=0.3,
        momentum=0.95,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for seed in range(3):
        for module in (ours, theirs):
            gradients(module, seed=seed)
        optimizer.step(0.05)
        reference.step()
    moved, expected = ours.weight.detach() - start, theirs.weight.detach() - start
    assert (moved - expected).norm() < 0.02 * expected.norm()


def test_a_strong_head_does_not_drown_a_weak_one():
    model = tiny_model()
    optimizer = MuonAdamW(model, TINY, OptimizerConfig(weight_decay=0.0))
    weight = model.get_parameter(LAYER + "self_attn.q_b_proj.weight")
    gradients(model, seed=0)
    weight.grad[:12] *= 30.0
    before = weight.detach().clone()
    optimizer.step(1.0)
    moved = (weight.detach() - before).view(2, 12, 16).square().mean(dim=(1, 2)).sqrt()
    assert all(0.14 < rms < 0.22 for rms in moved.tolist())


def test_the_embedding_has_its_own_rate_and_no_decay():
    model = tiny_model()
    optimizer = MuonAdamW(model, TINY, OptimizerConfig(embedding_lr_scale=3.0, weight_decay=0.5))
    gradients(model, seed=0)
    embedding = model.get_parameter("model.embed_tokens.weight")
    router = model.get_parameter(LAYER + "mlp.gate.weight")
    before = embedding.detach().clone(), router.detach().clone()
    optimizer.step(0.01)
    # The first AdamW step is the rate itself, whatever the gradient's size.
    torch.testing.assert_close((embedding - before[0]).abs(), torch.full_like(embedding, 0.03))
    decayed = (router - before[1] * (1 - 0.01 * 0.5)).abs()
    torch.testing.assert_close(decayed, torch.full_like(router, 0.01), rtol=1e-4, atol=1e-6)


def test_a_frozen_parameter_is_not_in_the_optimizer_and_does_not_decay():
    model = tiny_model()
    frozen = LAYER + "self_attn.o_proj.weight"
    model.get_parameter(frozen).requires_grad_(False)
    before = model.get_parameter(frozen).clone()
    optimizer = MuonAdamW(model, TINY, OptimizerConfig(weight_decay=0.5))
    gradients(model, seed=0)
    optimizer.step(0.1)
    assert torch.equal(model.get_parameter(frozen), before)
    assert not any(frozen in key for key in optimizer.state_dict())


def test_nothing_to_train_is_refused():
    with pytest.raises(ContractError, match="no parameter"):
        MuonAdamW(tiny_model().requires_grad_(False), TINY, OptimizerConfig())


def run(steps, *, interrupt=None, use_muon=True):
    model = tiny_model()
    config = OptimizerConfig(use_muon=use_muon)
    optimizer = MuonAdamW(model, TINY, config)
    for step in range(steps):
        if interrupt == step:
            state = {key: value.clone() for key, value in optimizer.state_dict().items()}
            optimizer = MuonAdamW(model, TINY, config)
            optimizer.load_state_dict(state)
        gradients(model, seed=step)
        optimizer.step(0.01)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("interrupt", [0, 2])
def test_saved_moments_continue_bit_for_bit(use_muon, interrupt):
    assert torch.equal(run(4, use_muon=use_muon), run(4, interrupt=interrupt, use_muon=use_muon))


def test_reset_forgets_all_moments():
    model = tiny_model()
    optimizer = MuonAdamW(model, TINY, OptimizerConfig())
    gradients(model, seed=0)
    optimizer.step(0.01)
    optimizer.reset()
    fresh = MuonAdamW(model, TINY, OptimizerConfig())
    assert optimizer.state_dict().keys() == fresh.state_dict().keys()
    assert not any(value.any() for value in optimizer.state_dict().values())


def test_moments_of_other_parameters_are_refused():
    optimizer = MuonAdamW(tiny_model(), TINY, OptimizerConfig())
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="missing"):
        optimizer.load_state_dict(dict(list(state.items())[1:]))
    with pytest.raises(CheckpointError, match=r"of no use for .*other"):
        optimizer.load_state_dict(state | {"momentum.other": torch.zeros(1)})


@pytest.mark.parametrize("use_muon", [True, False])
def test_moments_of_the_other_use_muon_are_refused(use_muon):
    model = tiny_model()
    saving = MuonAdamW(model, TINY, OptimizerConfig(use_muon=not use_muon))
    gradients(model, seed=0)
    saving.step(0.01)
    before = MuonAdamW(model, TINY, OptimizerConfig(use_muon=use_muon))
    with pytest.raises(CheckpointError, match=r"gate_proj.*another use_muon"):
        before.load_state_dict(saving.state_dict())


def test_a_parameter_without_gradient_in_one_step_keeps_its_momentum():
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(4))
    optimizer = MuonAdamW(model, TINY_LLAMA, OptimizerConfig(weight_decay=0.0))
    model.weight.grad = torch.eye(4)
    optimizer.step(0.1)
    after_one = model.weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step(0.1)
    assert not torch.equal(model.weight, after_one)
