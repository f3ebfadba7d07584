"""Golden numbers of the policy losses: values and gradients with respect to logits, float64."""

import json
from pathlib import Path

import pytest
import torch

from longarc.algos.clipping import clipped_objective
from longarc.algos.corrected_loss import decoupled_ppo_loss, truncated_loss
from longarc.algos.distill import distillation_advantages
from longarc.algos.distill_vocabulary import full_vocabulary_loss
from longarc.algos.importance import double_sided_weights, icepop_weights, masked_weights
from longarc.algos.policy_loss import (
    cispo_loss,
    double_sided_loss,
    gspo_loss,
    icepop_loss,
    ppo_clip_loss,
)

DATA = Path(__file__).parent / "data"


def load(name):
    return json.loads((DATA / f"{name}.json").read_text())


def case_ids(name):
    return [pytest.param(case, id=case["name"]) for case in load(name)["cases"]]


def flat(nested, dtype=torch.float64):
    return torch.tensor([x for row in nested for x in row], dtype=dtype)


def logits_and_logprobs(case):
    logits = flat(case["logits"]).requires_grad_()
    actions = flat(case["actions"], torch.long)
    logprobs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    return logits, logprobs


def weights_of(case):
    lengths = [sum(row) for row in case.get("loss_mask") or [[1] * len(r) for r in case["actions"]]]
    if case.get("reduction", "token") == "token":
        return None
    return flat([[1 / n] * len(row) for n, row in zip(lengths, case["actions"], strict=True)])


def mask_of(case):
    mask = case.get("loss_mask") or [[1] * len(row) for row in case["actions"]]
    return flat(mask, torch.bool)


def assert_matches(out, logits, *, loss, grad):
    mean = out.loss_sum / out.normaliser
    mean.backward()
    assert mean.item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(logits.grad, flat(grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", case_ids("icepop"))
def test_icepop_matches_value_gradient_and_number_of_popped_tokens(case):
    logits, logprobs = logits_and_logprobs(case)
    out = icepop_loss(
        logprobs,
        flat(case["logp_train_old"]),
        flat(case["logp_infer_old"]),
        flat(case["advantages"]),
        mask_of(case),
        low=1 / case["beta"],
        high=case["beta"],
        eps_low=case["eps_low"],
        eps_high=case["eps_high"],
        token_weights=weights_of(case),
    )
    assert_matches(out, logits, loss=case["loss"], grad=case["grad_logits"])
    assert out.num_rejected.item() == sum(w == 0 for row in case["pop"] for w in row)


def test_icepop_keeps_both_ends_of_its_band():
    meta = load("icepop")["meta"]
    ratios = torch.tensor(meta["unit_ratios"], dtype=torch.float64)
    expected = torch.tensor(meta["unit_pop"], dtype=torch.float64)
    assert torch.equal(icepop_weights(ratios, low=0.5, high=2.0), expected)


@pytest.mark.parametrize(
    "unit", [pytest.param(u, id=u["name"]) for u in load("dis")["meta"]["unit_f"]]
)
def test_double_sided_drops_both_ends_of_its_band(unit):
    ratios = torch.tensor(unit["ratios"], dtype=torch.float64)
    low, high = 1 - unit["eps_l"], 1 + unit["eps_h"]
    out = double_sided_weights(ratios, low=unit.get("lo_float64", low), high=high)
    assert torch.equal(out, torch.tensor(unit["f"], dtype=torch.float64))


@pytest.mark.parametrize("case", case_ids("dis"))
def test_double_sided_matches_value_gradient_and_number_of_rejected_tokens(case):
    logits, logprobs = logits_and_logprobs(case)
    mask = mask_of(case)
    low = {0.3: 0.7, 0.8: 0.2}[case["eps_l"]]  # bounds as bounds: 1 - 0.8 is not 0.2
    out = double_sided_loss(
        logprobs,
        flat(case["logp_rollout"]),
        flat(case["advantages"]),
        mask,
        low=low,
        high=1 + case["eps_h"],
    )
    assert_matches(
        out, logits, loss=case["loss_printed"], grad=case["grad_logits_recommended_stopgrad"]
    )
    assert out.num_rejected.item() / mask.sum().item() == pytest.approx(case["masked_fraction"])
    wrong = flat(case["grad_logits_literal_autodiff_WRONG"])
    assert not torch.allclose(logits.grad, wrong, rtol=0, atol=1e-6)


def test_double_sided_is_the_true_policy_gradient_in_expectation():
    check = load("dis")["meta"]["expectation_check"]
    policy = torch.tensor(check["pi"], dtype=torch.float64)
    rollout = torch.tensor(check["pi_rollout"], dtype=torch.float64)
    logits = policy.log().requires_grad_()
    for advantages in (check["generic"], check["constant_advantage"]):
        out = double_sided_loss(
            logits.log_softmax(0),
            rollout.log(),
            torch.tensor(advantages["advantage_per_token"], dtype=torch.float64),
            torch.ones(5, dtype=torch.bool),
            low=0.0,
            high=1e9,
            token_weights=rollout,
        )
        (grad,) = torch.autograd.grad(-out.loss_sum, logits)
        expected = torch.tensor(advantages["true_policy_gradient"], dtype=torch.float64)
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", case_ids("ppo_clip"))
def test_ppo_clip_matches_value_gradient_and_number_of_clipped_tokens(case):
    logits, logprobs = logits_and_logprobs(case)
    out = ppo_clip_loss(
        logprobs,
        flat(case["logp_old"]),
        flat(case["advantages"]),
        mask_of(case),
        eps_low=case["eps_low"],
        eps_high=case["eps_high"],
        dual_clip=case["dual_clip_c"],
    )
    assert_matches(out, logits, loss=case["loss"], grad=case["grad_logits"])
    clipped, advantages = flat(case["clipped"], torch.bool), flat(case["advantages"])
    saturated = (advantages < 0) & (flat(case["ratio"]) > (case["dual_clip_c"] or float("inf")))
    assert out.num_rejected.item() == (clipped | saturated).sum().item()


def test_a_bound_given_as_a_bound_excludes_itself():
    trap = next(u for u in load("dis")["meta"]["unit_f"] if u["name"].startswith("float_trap"))
    ratios = torch.tensor(trap["ratios"], dtype=torch.float64)
    assert not double_sided_weights(ratios, low=0.2, high=4.0).any()


@pytest.mark.parametrize("unit", load("ppo_clip")["meta"]["unit"])
def test_the_clipped_objective_is_flat_only_strictly_outside(unit):
    # log then exp may move a ratio off its boundary by one ulp: step to a log that comes back exactly.
    log_ratio = torch.tensor([unit["ratio"]], dtype=torch.float64).log()
    if log_ratio.exp().item() != unit["ratio"]:
        pytest.skip("no float64 logarithm of this ratio comes back exactly")
    log_ratio.requires_grad_()
    advantage = torch.tensor([unit["A"]], dtype=torch.float64)
    objective, _ = clipped_objective(
        log_ratio, advantage, eps_low=unit["eps_low"], eps_high=unit["eps_high"]
    )
    objective.sum().backward()
    assert objective.item() == pytest.approx(unit["objective"], abs=1e-15)
    assert log_ratio.grad.item() == pytest.approx(
        unit["d_objective_d_ratio"] * unit["ratio"], abs=1e-15
    )


@pytest.mark.parametrize("case", case_ids("opd"))
def test_distillation_matches_advantages_value_and_gradient(case):
    logits, logprobs = logits_and_logprobs(case)
    teacher = flat(case["teacher_logp"])
    advantages = distillation_advantages(logprobs, teacher)
    assert not advantages.requires_grad
    torch.testing.assert_close(advantages, flat(case["advantages"]), rtol=0, atol=1e-12)

    out = icepop_loss(
        logprobs,
        logprobs.detach(),
        logprobs.detach() - flat(case["rho"]).log(),
        advantages,
        mask_of(case),
        low=1 / case["beta"],
        high=case["beta"],
        eps_low=0.2,
        eps_high=0.28,
        token_weights=weights_of(case),
    )
    assert_matches(out, logits, loss=case["loss"], grad=case["grad_logits"])


def test_distillation_descends_the_reverse_kl():
    case = load("opd")["cases"][0]["full_vocab_token0"]
    student = torch.tensor(case["student"], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor(case["teacher"], dtype=torch.float64).log()
    logprobs = student.log_softmax(0)
    advantages = distillation_advantages(logprobs, teacher)
    (grad,) = torch.autograd.grad((logprobs.detach().exp() * advantages * logprobs).sum(), student)
    expected = torch.tensor(case["minus_grad_reverse_kl"], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_the_divergence_over_the_vocabulary_has_the_golden_gradient():
    case = load("opd")["cases"][0]["full_vocab_token0"]
    student = torch.tensor([case["student"]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([case["teacher"]], dtype=torch.float64).log()
    out = full_vocabulary_loss(student, teacher, torch.tensor([True]))
    (grad,) = torch.autograd.grad(out.loss_sum, student)
    expected = torch.tensor([case["minus_grad_reverse_kl"]], dtype=torch.float64)
    torch.testing.assert_close(-grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", case_ids("cispo"))
def test_cispo_matches_value_gradient_and_number_of_clamped_tokens(case):
    logits, logprobs = logits_and_logprobs(case)
    out = cispo_loss(
        logprobs,
        flat(case["logp_old"]),
        flat(case["advantages"]),
        mask_of(case),
        eps_low=case["eps_low"],
        eps_high=case["eps_high"],
    )
    assert_matches(out, logits, loss=case["loss"], grad=case["grad_logits"])
    ratio, weight = flat(case["ratio"]), flat(case["weight_sg"])
    assert out.num_rejected.item() == ((ratio - weight).abs() > 1e-9).sum().item()


@pytest.mark.parametrize("case", case_ids("gspo"))
def test_gspo_matches_value_and_gradient(case):
    logits, logprobs = logits_and_logprobs(case)
    lengths = [len(row) for row in case["actions"]]
    out = gspo_loss(
        logprobs,
        flat(case["logp_old"]),
        torch.tensor(case["seq_advantages"], dtype=torch.float64),
        torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
        mask_of(case),
        eps_low=case["eps_low"],
        eps_high=case["eps_high"],
        token_weights=flat([[1 / n] * n for n in lengths]),
    )
    assert_matches(out, logits, loss=case["loss"], grad=case["grad_logits"])


@pytest.mark.parametrize("case", case_ids("tis_mis"))
def test_truncated_importance_sampling_matches_value_and_gradient(case):
    logits, logprobs = logits_and_logprobs(case)
    out = truncated_loss(
        logprobs,
        flat(case["logp_train_old"]),
        flat(case["logp_infer_old"]),
        flat(case["advantages"]),
        mask_of(case),
        cap=case["cap"],
        eps_low=case["eps_low"],
        eps_high=case["eps_high"],
    )
    assert_matches(out, logits, loss=case["loss"], grad=case["grad_logits"])
    assert out.num_rejected.item() == (flat(case["rho"]) > case["cap"]).sum().item()


@pytest.mark.parametrize("unit", load("tis_mis")["meta"]["mis_unit"])
def test_masked_importance_sampling_keeps_and_vetoes_the_golden_sequences(unit):
    log_ratio = torch.tensor(unit["log_ratio"], dtype=torch.float64)
    mask = torch.ones(len(log_ratio), dtype=torch.bool)
    ids = torch.zeros(len(log_ratio), dtype=torch.long)
    levels = [
        ("sequence", 0.5, 2.0, unit["mis_seq_keep_0p5_2"]),
        ("geometric", 0.99, 1.01, unit["geo_keep_0p99_1p01"]),
    ]
    for level, low, high, keeps in levels:
        weights = masked_weights(log_ratio, mask, ids, low=low, high=high, level=level)
        expected = log_ratio.exp() if keeps else torch.zeros_like(log_ratio)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    vetoed = masked_weights(log_ratio, mask, ids, low=0.0, high=1e9, veto=1e-4)
    assert (not vetoed.any()) is unit["veto_1e_4"]


@pytest.mark.parametrize("case", case_ids("decoupled_ppo"))
def test_decoupled_ppo_matches_value_and_gradient(case):
    logits, logprobs = logits_and_logprobs(case)
    out = decoupled_ppo_loss(
        logprobs,
        flat(case["logp_prox"]),
        flat(case["logp_behav"]),
        flat(case["advantages"]),
        mask_of(case),
        eps_low=case["eps_low"],
        eps_high=case["eps_high"],
        behaviour_cap=case["behav_cap_mask"],
    )
    assert_matches(out, logits, loss=case["loss"], grad=case["grad_logits"])
    assert out.num_rejected.item() == (flat(case["weight_sg"]) == 0).sum().item()
