"""Factors, bounds and shapes that mean nothing are refused by name, with what to choose instead."""

import math

import pytest
import torch

from longarc.algos import losses
from longarc.algos.actor_critic import kl_constrained_loss, step_advantages
from longarc.algos.advantages import running_mean_advantages
from longarc.algos.corrected_loss import decoupled_ppo_loss, sequence_masked_loss, truncated_loss
from longarc.algos.distill import guided_advantages
from longarc.algos.distill_vocabulary import top_k_loss
from longarc.algos.filters import is_in_difficulty_window
from longarc.algos.gae import (
    cross_trajectory_gae,
    length_adaptive_lambda,
    skip_observation_gae,
    token_gae,
)
from longarc.algos.importance import (
    double_sided_weights,
    icepop_weights,
    masked_weights,
    truncated_weights,
)
from longarc.algos.policy_loss import cispo_loss, ppo_clip_loss
from longarc.algos.preference import dpo_sft_loss, implicit_rewards
from longarc.algos.protocols import LossInputs
from longarc.algos.reductions import token_weights
from longarc.algos.reinforce_plus_plus import carried_returns
from longarc.algos.replay import is_worth_replaying, perplexity
from longarc.algos.reward_model import bradley_terry_loss
from longarc.algos.shaping import overlong_penalty
from longarc.algos.value_loss import clipped_value_loss
from longarc.errors import ConfigError, ContractError

ONE = torch.tensor([-1.0])
MASK = torch.tensor([True])
IDS = torch.tensor([0])
CLIP = {"eps_low": 0.2, "eps_high": 0.28}
NAN = math.nan


def segments(**changes):
    settings = {"terminal_reward": 1.0, "gamma": 1.0, "lam": 0.9} | changes
    return cross_trajectory_gae([[0.5]], **settings)


CONFIG = {
    "gamma above 1": (lambda: token_gae([1.0], [0.0], gamma=1.1, lam=1.0), "gamma=1.1"),
    "gamma not a number": (lambda: token_gae([1.0], [0.0], gamma=NAN, lam=1.0), "gamma=nan"),
    "lambda below 0": (lambda: token_gae([1.0], [0.0], gamma=1.0, lam=-0.1), "lam=-0.1"),
    "gamma of segments": (lambda: segments(gamma=2.0), "gamma=2.0"),
    "gamma of returns": (lambda: carried_returns([1.0], [True], gamma=-1.0), "gamma=-1.0"),
    "gamma of WebRL": (lambda: step_advantages([1.0], [0.0], gamma=1.5), "gamma=1.5"),
    "lambda of WebRL": (lambda: step_advantages([1.0], [0.0], lam=1.5), "lam=1.5"),
    "alpha": (lambda: length_adaptive_lambda(3, alpha=0.0), "alpha=0.0 .* above 0"),
    "alpha and lambda": (lambda: segments(alpha=1.5), "alpha=1.5, lam=0.9: give exactly one"),
    "neither": (lambda: segments(lam=None), "alpha=None, lam=None"),
    "closed band": (lambda: icepop_weights(ONE, low=1.5, high=2.0), "low=1.5.* excludes"),
    "open band": (lambda: double_sided_weights(ONE, low=1.0, high=2.0), "low=1.0.* < 1 <"),
    "epsilons": (lambda: double_sided_weights(ONE, low=0.3, high=0.8), "bounds and not eps"),
    "band below 0": (lambda: icepop_weights(ONE, low=-0.1, high=2.0), "low=-0.1"),
    "masked band": (lambda: masked_weights(ONE, MASK, IDS, low=0.2, high=0.9), "high=0.9"),
    "veto": (lambda: masked_weights(ONE, MASK, IDS, low=0.5, high=2.0, veto=2.0), "veto=2.0"),
    "cap": (lambda: truncated_weights(ONE, cap=0.0), "cap=0.0"),
    "cap of a loss": (
        lambda: truncated_loss(ONE, ONE, ONE, ONE, MASK, cap=NAN, **CLIP),
        "cap=nan",
    ),
    "behaviour cap": (
        lambda: decoupled_ppo_loss(ONE, ONE, ONE, ONE, MASK, behaviour_cap=-1.0, **CLIP),
        "behaviour_cap=-1.0",
    ),
    "delta": (
        lambda: sequence_masked_loss(ONE, ONE, ONE, IDS, MASK, delta=-1.0, **CLIP),
        "delta=-1.0",
    ),
    "clip": (
        lambda: ppo_clip_loss(ONE, ONE, ONE, MASK, eps_low=-0.2, eps_high=0.28),
        "eps_low=-0.2.* would exclude 1",
    ),
    "clamp": (lambda: cispo_loss(ONE, ONE, ONE, MASK, eps_low=1.0, eps_high=-2.0), "high=-2.0"),
    "dual clip": (
        lambda: ppo_clip_loss(ONE, ONE, ONE, MASK, dual_clip=1.2, **CLIP),
        r"dual_clip=1.2 is not above 1 \+ eps_high = 1.28",
    ),
    "value clip": (lambda: clipped_value_loss(ONE, ONE, ONE, MASK, clip=0.0), "clip=0.0"),
    "window of a mean": (lambda: running_mean_advantages([1.0], (), window=0), "window=0"),
    "teacher": (lambda: guided_advantages(ONE, ONE, ONE, coeff=-1.0), "coeff=-1.0"),
    "no bucket": (
        lambda: top_k_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[0, 1]]), MASK),
        "2 teacher tokens of a vocabulary of 2",
    ),
    "beta": (lambda: implicit_rewards(ONE, ONE, beta=0.0), "beta=0.0"),
    "beta of DPO": (lambda: dpo_sft_loss(ONE, ONE, ONE, ONE, ONE, beta=-1.0), "beta=-1.0"),
    "sft weight": (lambda: dpo_sft_loss(ONE, ONE, ONE, ONE, ONE, sft_weight=-1.0), "sft_weight"),
    "beta of WebRL": (
        lambda: kl_constrained_loss(ONE, ONE, ONE, IDS, MASK, beta=0.0),
        "beta=0.0",
    ),
    "margin": (lambda: bradley_terry_loss(ONE, ONE, margin=-1.0), "margin=-1.0"),
    "difficulty": (
        lambda: is_in_difficulty_window([1.0], low=0.9, high=0.1),
        "low=0.9, high=0.1 is an empty window",
    ),
    "overlong": (
        lambda: overlong_penalty(3, max_tokens=4, cache_tokens=5),
        "cache_tokens=5 of max_tokens=4",
    ),
    "perplexity": (
        lambda: is_worth_replaying([-1.0], min_perplexity=0.5),
        "min_perplexity=0.5",
    ),
}

CONTRACT = {
    "lengths": (lambda: token_gae([1.0], [0.0, 0.0], gamma=1.0, lam=1.0), "'values': 2"),
    "lengths of actions": (lambda: step_advantages([1.0], []), "1 rewards and 0 values"),
    "reward on an observation": (
        lambda: skip_observation_gae([1.0, 0.5], [0.0] * 2, [True, False], gamma=1.0, lam=1.0),
        "reward 0.5 of token 1 sits on an observation",
    ),
    "no token": (lambda: length_adaptive_lambda(0, alpha=1.5), "num_action_tokens=0"),
    "empty segment": (
        lambda: cross_trajectory_gae([[0.5], []], terminal_reward=1.0, gamma=1.0, lam=1.0),
        "segment 1 has no trained token",
    ),
    "nothing said": (lambda: perplexity([]), "without tokens"),
    "multiplicities": (
        lambda: token_weights([[1]], [1, 2], reduction="token_mean"),
        "1 trajectories but 2 multiplicities",
    ),
}


@pytest.mark.parametrize("case", CONFIG)
def test_a_setting_without_meaning_is_a_config_error_that_names_it(case):
    wrong, said = CONFIG[case]
    with pytest.raises(ConfigError, match=said):
        wrong()


@pytest.mark.parametrize("case", CONTRACT)
def test_data_that_do_not_fit_are_a_contract_error(case):
    wrong, said = CONTRACT[case]
    with pytest.raises(ContractError, match=said):
        wrong()


def test_a_teacher_s_advantages_have_no_ratio_of_sequences():
    inputs = LossInputs(
        policy_logprobs=torch.tensor([-1.0, -1.0]),
        proximal_logprobs=torch.tensor([-1.0, -1.0]),
        behaviour_logprobs=torch.tensor([-1.0, -1.0]),
        advantages=torch.tensor([0.5, -0.5]),
        train_mask=torch.tensor([True, True]),
        token_weights=torch.ones(2),
        sequence_ids=torch.tensor([0, 0]),
    )
    with pytest.raises(ConfigError, match="one advantage for all tokens of a segment"):
        losses.gspo(inputs)
