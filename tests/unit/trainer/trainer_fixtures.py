"""Small models and batches for the trainer's tests."""

import os
import random
import signal
import time
from pathlib import Path

import torch

from longarc.config.model import GlmMoeDsaConfig, LlamaConfig
from longarc.models.build import build_model
from longarc.records.batch import Batch
from longarc.records.outcome import Outcome
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.trajectory import Group, Trajectory

TINY = GlmMoeDsaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=8,
    max_position_embeddings=256,
    initializer_range=0.1,
)
TINY_LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
    max_position_embeddings=256,
)


def tiny_model(*, seed=0, dtype=torch.float32, config=TINY):
    return build_model(config, seed=seed, dtype=dtype)


def make_segment(prompt, answer, logprobs, *, version=0, order=0):
    pad, n = len(prompt), len(answer)
    return Segment(
        token_ids=(*prompt, *answer),
        is_sampled=(False,) * pad + (True,) * n,
        train_mask=(False,) * pad + (True,) * n,
        behaviour_logprobs=(0.0,) * pad + tuple(logprobs),
        policy_versions=(NOT_SAMPLED,) * pad + (version,) * n,
        order=order,
    )


def make_trajectory(segments, *, name, reward, family="math", outcome=Outcome.COMPLETED):
    return Trajectory(
        id=name,
        stage="rl",
        group_id=name.rpartition("/")[0],
        task_id="task",
        family=family,
        outcome=outcome,
        reward=reward,
        reward_parts={},
        segments=tuple(segments),
        messages=(),
        tools=(),
        num_turns=1,
        difficulty=0.0,
        started_at_s=0.0,
        duration_s=0.0,
    )


def make_group(trajectories, *, name="g", multiplicities=None):
    return Group(
        id=name,
        task_id="task",
        family=trajectories[0].family,
        trajectories=tuple(trajectories),
        multiplicities=tuple(multiplicities or [1] * len(trajectories)),
    )


def make_batch(groups, *, step=0, version=0, resets_optimizer=False):
    return Batch(
        stage="rl",
        step=step,
        groups=tuple(groups),
        trainer_version=version,
        resets_optimizer=resets_optimizer,
    )


def random_batch(*, seed=0, num_groups=2, group_size=4, step=0, version=0, families=("math",)):
    """Groups with a prompt of 20 tokens, answers of 3 to 9, and roughly on-policy log-probabilities."""
    rng = random.Random(seed)
    groups = []
    for g in range(num_groups):
        prompt = [rng.randrange(64) for _ in range(20)]
        members = []
        for m in range(group_size):
            answer = [rng.randrange(64) for _ in range(rng.randrange(3, 10))]
            logprobs = [-4.1 + 0.2 * rng.random() for _ in answer]
            members.append(
                make_trajectory(
                    [make_segment(prompt, answer, logprobs, version=version)],
                    name=f"rl/{g}/{m}",
                    reward=float(rng.random() < 0.5) if m else float(g % 2 == 0),
                    family=families[g % len(families)],
                )
            )
        groups.append(make_group(members, name=f"g{g}"))
    return make_batch(groups, step=step, version=version)


def ends_soon(pid):
    """Say whether a process ends within ten seconds; kill it if it does not."""
    for _ in range(200):
        if not _is_running(pid):
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def _is_running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
