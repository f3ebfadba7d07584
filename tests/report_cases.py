"""A small run as training leaves it on disk, for tests of the report: every number is known."""

import math
from dataclasses import replace

import orjson

from ledger_cases import make_admission, make_batch, make_group, make_trajectory
from longarc.records.batch import StepReport, TokenReport
from longarc.records.message import Message, Role
from longarc.records.outcome import Disposition, Outcome
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.runs.directory import RunDirectory
from longarc.runs.files import json_document, write_atomically
from longarc.runs.metrics import JsonLinesSink
from longarc.tokens.tokenizer import GLM_SPECIAL_TOKENS, Tokenizer

EVIL = "</script><script>window.hacked = true</script><b onmouseover=alert(1)>&amp;\u2028"
"""What a model may say to break out of the page."""

NUM_STEPS = 6
GROUP_SIZE = 4
STAGE = "agentic_rl"

RECIPE = {
    "name": "demo <b>run</b>",
    "seed": 7,
    "model": {"family": "glm_moe_dsa", "num_hidden_layers": 4, "hidden_size": 128},
    "stages": {
        "pretrain": {"kind": "pretrain", "num_steps": 40},
        "sft": {"kind": "sft", "num_steps": 20},
        STAGE: {"kind": STAGE, "loop": {"num_steps": NUM_STEPS, "max_lag_steps": 2}},
        "distill": {"kind": "distill", "loop": {"num_steps": 4, "max_lag_steps": 0}},
        "eval": {
            "kind": "eval",
            "stages": ["sft", STAGE, "distill"],
            "tasks": {"files": {}, "reasoning": {}},
        },
    },
}

SOLVED = {
    ("sft", "files"): 20,
    ("sft", "reasoning"): 32,
    (STAGE, "files"): 58,
    (STAGE, "reasoning"): 12,
    ("distill", "files"): 56,
    ("distill", "reasoning"): 33,
}
"""Tasks solved of 64 in each finished cell: files are learned and kept, reasoning is lost and comes back."""


class Clock:
    """Wall time that moves one second at every look."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def make_tokenizer() -> Tokenizer:
    """One token a byte, GLM's control tokens, and one control token that is markup."""
    special = (*GLM_SPECIAL_TOKENS, EVIL)
    return Tokenizer.train([], vocab_size=256 + len(special), special_tokens=special)


def make_segment(tokenizer: Tokenizer, answer: str, *, version: int) -> Segment:
    """A prompt, an answer of which the last byte is not trained on, and markup as the last token."""
    prompt = [tokenizer.special_id("<|user|>"), *tokenizer.encode("Wo ist der Schlüssel?\n")]
    prompt.append(tokenizer.special_id("<|assistant|>"))
    sampled = [*tokenizer.encode(answer), tokenizer.special_id(EVIL)]
    given, said = len(prompt), len(sampled)
    # The first half of the answer was sampled by the weights before.
    versions = [version - (version > 0 and i < said // 2) for i in range(said)]
    return Segment(
        token_ids=(*prompt, *sampled),
        is_sampled=(False,) * given + (True,) * said,
        train_mask=(False,) * given + (True,) * (said - 1) + (False,),
        behaviour_logprobs=(0.0,) * given + tuple(-0.25 * (i % 5) for i in range(said)),
        policy_versions=(NOT_SAMPLED,) * given + tuple(versions),
    )


def make_rollout(tokenizer, group, member, *, version, reward):
    trajectory = make_trajectory(make_admission(group, member, stage=STAGE), reward=reward)
    answer = Message(role=Role.ASSISTANT, content=f"The key is here. {EVIL}", reasoning="\ud800?")
    return replace(
        trajectory,
        messages=(*trajectory.messages[:-1], answer),
        segments=(make_segment(tokenizer, f"answer {group}.{member}", version=version),),
        info={"note": EVIL, "files_read": 2},
    )


def make_step_report(batch, trained):
    """Log-ratio 1e-6 everywhere; the advantage is the reward less one half."""
    reports = []
    for trajectory in trained[:2]:
        (segment,) = trajectory.segments
        advantage = trajectory.reward - 0.5
        masked = list(zip(segment.train_mask, segment.behaviour_logprobs, strict=True))
        reports.append(
            TokenReport(
                trajectory_id=trajectory.id,
                segment_order=0,
                policy_logprobs=tuple(p + 1e-6 if m else 0.0 for m, p in masked),
                advantages=tuple(advantage if m else 0.0 for m, _ in masked),
                values=tuple(0.25 if m else 0.0 for m, _ in masked),
            )
        )
    return StepReport(
        step=batch.step,
        policy_version=batch.trainer_version + 1,
        weights_sha256=f"{batch.step:064x}",
        num_trained_tokens=sum(t.num_trained_tokens for t in trained),
        metrics=(),
        token_reports=tuple(reports),
        histograms={
            "mismatch/log_ratio": (0.0, 2e-7, -3e-7, 5e-8),
            "ratio/log_ratio": (0.0, 0.02, -0.3),
        },
    )


def make_report_run(path):
    """Write the run; return its path."""
    clock = Clock()
    with (
        RunDirectory.create(path, recipe=RECIPE, seeds={"run": 7}, clock=clock) as run,
        run.open_ledger() as ledger,
    ):
        tokenizer = make_tokenizer()
        tokenizer.save(path / "tokenizer.json")
        sink = JsonLinesSink(run.metrics_path, clock=clock)
        supervised(run, sink, "pretrain", 40, start=7.6)
        supervised(run, sink, "sft", 20, start=3.0)
        run.event("stage_started", stage=STAGE)
        reinforce(ledger, sink, tokenizer)
        run.event("stage_ended", stage=STAGE, elapsed_s=120.0)
        finish(run, STAGE)
        evaluate(run, ledger)
        sink.close()
    return path


def supervised(run, sink, stage, num_steps, *, start):
    run.event("stage_started", stage=stage)
    for step in range(1, num_steps + 1):
        values = {
            "loss/lm_nats": start / math.sqrt(step),
            "loss/indexer_kl_nats": 0.1 / step,
            "grad/norm": 1.0 + 1.0 / step,
            "train/num_tokens": 1000.0,
            "train/tokens_per_s": 500.0 if step != 3 else math.nan,
            "router/max_load": 2.0,
        }
        sink.write(stage=stage, step=step, values=values)
    run.event("stage_ended", stage=stage, elapsed_s=30.0)
    finish(run, stage)


def finish(run, stage):
    writer = run.stage(stage).writer(keep_last=1)
    header = orjson.dumps({"w": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}})
    weights = len(header).to_bytes(8, "little") + header + bytes(60)
    checkpoint = writer.write(
        lambda directory: (directory / "model.safetensors").write_bytes(weights),
        kind="policy",
        stage=stage,
        step=1,
        policy_version=1,
        model=RECIPE["model"],
        tokenizer_sha256=None,
    )
    run.stage(stage).set_final(checkpoint)


def reinforce(ledger, sink, tokenizer):
    """One group a step; the last member of each group is lost with its sandbox."""
    for step in range(NUM_STEPS):
        ledger.admit([make_admission(step, m, stage=STAGE) for m in range(GROUP_SIZE)])
        rewards = [1.0 if m <= step // 2 else 0.0 for m in range(GROUP_SIZE - 1)]
        # Every second group is one step old, the tokens of its first half two.
        version = max(0, step - step % 2)
        trained = [
            make_rollout(tokenizer, step, m, version=version, reward=reward)
            for m, reward in enumerate(rewards)
        ]
        lost = make_trajectory(
            make_admission(step, GROUP_SIZE - 1, stage=STAGE),
            reward=None,
            outcome=Outcome.SANDBOX_LOST,
        )
        for trajectory in (*trained, lost):
            ledger.complete(trajectory)
        batch = make_batch([make_group(trained)], step=step, stage=STAGE)
        fault = {lost.id: (Disposition.ENVIRONMENT_FAULT, "the sandbox is gone")}
        ledger.commit_step(batch, make_step_report(batch, trained), filtered=fault)
        success = sum(rewards) / len(rewards)
        values = {
            "loss/policy": 0.01 * (-1) ** step,
            "policy/entropy_nats": 2.0 - 0.1 * step,
            "success/mean": success,
            "success/files": success,
            "reward/files": success + 0.05,
            "lag/mean_steps": 0.5,
            "lag/max_steps": 1.0,
            "mismatch/mean_abs_log_ratio": 2e-7,
            "grad/norm": 0.5,
        }
        sink.write(stage=STAGE, step=step, values=values)
    waiting = make_admission(NUM_STEPS, 0, stage=STAGE)
    ledger.admit([waiting])
    ledger.complete(make_rollout(tokenizer, NUM_STEPS, 0, version=NUM_STEPS - 1, reward=0.5))


def evaluate(run, ledger):
    """Every cell had one excluded rollout; two rollouts of each are in the ledger."""
    cells = []
    for index, ((stage, family), solved) in enumerate(SOLVED.items()):
        cells.append(make_cell(stage, family, solved))
        for member, reward in enumerate((1.0, 0.0)):
            admission = make_admission(2 * index + member, stage="eval")
            trajectory = replace(
                make_trajectory(admission, reward=reward),
                id=f"eval/{stage}/{family}/{member}/0",
                group_id=f"eval/{stage}/{family}/{member}",
                family=family,
            )
            ledger.complete(trajectory, disposition=Disposition.EVALUATED)
    directory = run.stage("eval").path
    directory.mkdir(parents=True)
    write_atomically(directory / "results.json", json_document({"cells": cells}))
    run.event("stage_started", stage="eval")
    run.event("stage_ended", stage="eval", elapsed_s=20.0)


def make_cell(stage, family, num_solved, *, num_graded=64, num_excluded=1):
    return {
        "stage": stage,
        "family": family,
        "num_tasks": num_graded + num_excluded,
        "num_solved": num_solved,
        "num_graded": num_graded,
        "num_excluded": num_excluded,
        "mean_reward": num_solved / num_graded if num_graded else None,
        "mean_turns": 2.0,
        "mean_sampled_tokens": 31.0,
        "policy_version": 3,
        "outcomes": {"completed": num_graded, "sandbox_lost": num_excluded},
        "by_difficulty": {"10": [0, 4], "3": [num_solved, num_graded - 4]},
        "elapsed_s": 2.0,
    }
