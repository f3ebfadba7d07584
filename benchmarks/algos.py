"""What the mathematics of a step costs beside the model's own, and whether packing and splitting leave it alone.

Cost: 64 sequences of 1,024 trained tokens on longarc-nano, sparse attention. The model's part is packing, forward,
log-probabilities of the trained tokens and backward, with gradients of all ones. The part of the algorithm is what comes
between: advantages, importance weights and loss, forward and backward down to the log-probabilities. Each loss of
``longarc.algos.losses`` is measured with group advantages, and that of SAO with a critic's (skip-observation GAE with
a length-adaptive lambda) as well.

Equality, in float64: 4 groups of 6 that share prompts, each with every loss; half of the sequences were sampled by
nearly the same policy and half by another one, so that every band lets some through. Packed: all in one micro-batch,
against one sequence after the other. Split: one step of four processes, against one of this one.

Usage: python benchmarks/algos.py [--threads 1] [--repeats 1] [--quick]
"""

import argparse
import contextlib
import inspect
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Table, positive
from sampled import sampled_group, sampled_trajectory
from torch import Tensor

from longarc.algos import losses
from longarc.algos.advantages import group_advantages
from longarc.algos.gae import length_adaptive_lambda, skip_observation_gae
from longarc.algos.protocols import LossInputs, PolicyLoss
from longarc.config.model import GlmMoeDsaConfig
from longarc.config.training import OptimizerConfig
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.projection import token_logprobs
from longarc.records.batch import Batch
from longarc.trainer.credit import train_items
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.gradients import GradientSource, in_this_process
from longarc.trainer.packing import Document, pack_shared
from longarc.trainer.policy import PolicySettings, PolicyTrainer, documents_of
from longarc.trainer.policy_objective import PolicyObjective

NANO = GlmMoeDsaConfig()
NUM_SEQUENCES, NUM_TOKENS, GROUP_SIZE = 64, 1024, 8
MICRO_BATCH_TOKENS = 8192
MOST_FRAC = 0.05
MOST_GAP = 1e-6
NUM_PROCESSES = 4
LOSSES: dict[str, PolicyLoss] = {
    name: function
    for name, function in vars(losses).items()
    if inspect.isfunction(function) and function.__module__ == losses.__name__ and name[0] != "_"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """One forward and backward of the model over all tokens."""

    elapsed_s: float
    logprobs: Tensor
    """log pi [nats] of each trained token, sequence after sequence."""


def model_step(num_sequences: int, *, num_tokens: int) -> ModelStep:
    """Compute log-probabilities of drawn tokens, and gradients of all ones."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_sequences, num_tokens + 1)
    rows = torch.randint(NANO.vocab_size, shape, generator=generator).tolist()
    model = build_model(NANO, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("indexer" not in name)  # as in every RL stage
    documents = [Document(token_ids=row) for row in rows]
    found = []
    started_s = time.perf_counter()
    for batch in pack_shared(documents, micro_batch_tokens=MICRO_BATCH_TOKENS):
        output = model(batch.token_ids, batch.layout, attention="sparse")
        hidden = output.hidden[batch.source_rows]
        logprobs, _ = token_logprobs(hidden, model.output_weight, batch.target_ids)
        logprobs.sum().backward()
        found.append(logprobs.detach())
    return ModelStep(elapsed_s=time.perf_counter() - started_s, logprobs=torch.cat(found))


def rewards_of(num_sequences: int) -> list[float]:
    """Draw rewards of 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, (num_sequences,), generator=generator).double().tolist()


def by_group(num_tokens: int, num_sequences: int) -> Tensor:
    """Return the advantage of each token, from its group."""
    rewards = rewards_of(num_sequences)
    groups = [rewards[i : i + GROUP_SIZE] for i in range(0, num_sequences, GROUP_SIZE)]
    advantages = torch.cat([group_advantages(group) for group in groups])
    return advantages.float().repeat_interleave(num_tokens)


def by_critic(num_tokens: int, num_sequences: int) -> Tensor:
    """Return the advantage of each token from drawn values, every eighth token an observation."""
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(num_sequences, num_tokens, generator=generator)
    is_action = torch.arange(num_tokens) % 8 != 3
    lam = length_adaptive_lambda(int(is_action.sum()), alpha=1.5)
    last = int(is_action.nonzero()[-1])
    rows = []
    for reward, own in zip(rewards_of(num_sequences), values, strict=True):
        rewards = torch.zeros(num_tokens)
        rewards[last] = reward
        rows.append(skip_observation_gae(rewards, own, is_action, gamma=1.0, lam=lam)[0])
    return torch.cat(rows).float()


def mathematics_s(
    loss: PolicyLoss,
    logprobs: Tensor,
    advantages: Callable[[int, int], Tensor],
    *,
    num_sequences: int,
    repeats: int,
) -> float:
    """Return the best time [s] of what lies between log-probabilities and their gradient."""
    num_tokens = len(logprobs) // num_sequences
    noise = 0.05 * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(3))
    ids = torch.arange(num_sequences).repeat_interleave(num_tokens)
    best_s = float("inf")
    for _ in range(repeats):
        policy = logprobs.clone().requires_grad_()
        started_s = time.perf_counter()
        inputs = LossInputs(
            policy_logprobs=policy,
            proximal_logprobs=policy.detach(),
            behaviour_logprobs=logprobs + noise,
            advantages=advantages(num_tokens, num_sequences),
            train_mask=torch.ones_like(policy, dtype=torch.bool),
            token_weights=torch.ones_like(policy),
            sequence_ids=ids,
        )
        loss(inputs).loss_sum.backward()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


def shared_batch() -> Batch:
    """Draw groups that share prompts; every other member has another policy's log-probabilities."""
    model = build_model(NANO, seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    groups = []
    for task in range(4):
        prompt = torch.randint(NANO.vocab_size, (40,), generator=generator).tolist()
        members = []
        for member in range(6):
            length = int(torch.randint(8, 40, (), generator=generator))
            ids = torch.randint(NANO.vocab_size, (length,), generator=generator).tolist()
            noise = (0.3 if member % 2 else 0.002) * torch.randn(length, generator=generator)
            logprobs = (scores(model, [*prompt, *ids])[-length:] + noise).tolist()
            members.append(sampled_trajectory(f"0/{task}/{member}", prompt, ids, logprobs, 0))
        groups.append(sampled_group(members))
    return Batch(stage="bench", step=0, groups=tuple(groups), trainer_version=0)


@torch.no_grad()
def scores(model: Decoder, token_ids: list[int]) -> Tensor:
    """Return log pi [nats] of each token but the first."""
    (batch,) = pack_shared([Document(token_ids=token_ids)], micro_batch_tokens=MICRO_BATCH_TOKENS)
    output = model(batch.token_ids, batch.layout, attention="sparse")
    hidden = output.hidden[batch.source_rows]
    return token_logprobs(hidden, model.output_weight, batch.target_ids)[0]


def gradients_of(loss: PolicyLoss, batch: Batch, *, is_packed: bool) -> dict[str, Tensor]:
    """Return the gradients that a step would see, in float64: of all sequences at once, or of one after the other."""
    model = build_model(NANO, seed=0, dtype=torch.float64)
    objective = PolicyObjective(
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        temperature=1.0,
        attention="sparse",
        loss=loss,
        loss_settings={},
        teachers=None,
    )
    objective.select_parameters(model)
    items = train_items(batch, reduction="token_mean", advantage_fn=group_advantages)
    documents = documents_of(items)
    parts = [documents] if is_packed else [[document] for document in documents]
    normaliser = sum(objective.add_gradients(model, part, 0).normaliser for part in parts)
    return {
        name: parameter.grad / normaliser
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def weights_after(loss: PolicyLoss, batch: Batch, gradients: GradientSource) -> dict[str, Tensor]:
    """Return the weights after one step, in float64."""
    with tempfile.TemporaryDirectory(prefix="longarc-algos-") as scratch:
        trainer = PolicyTrainer(
            build_model(NANO, seed=0, dtype=torch.float64),
            PolicySettings(
                optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0),
                num_steps=1,
                micro_batch_tokens=MICRO_BATCH_TOKENS,
            ),
            loss=loss,
            publish_directory=scratch,
            gradients=gradients,
        )
        trainer.take_step(batch)
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of tensors."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def add_costs(table: Table, options: argparse.Namespace) -> None:
    """Measure the model once or more, then every loss."""
    num_sequences, num_tokens = (8, 128) if options.quick else (NUM_SEQUENCES, NUM_TOKENS)
    steps = [model_step(num_sequences, num_tokens=num_tokens) for _ in range(options.repeats)]
    model_s = min(step.elapsed_s for step in steps)
    logprobs = steps[0].logprobs
    what = f"{num_sequences} x {num_tokens} tokens on nano"
    table.row(f"forward and backward of the model, {what} [s]", f"{model_s:.2f}")
    shared = {"num_sequences": num_sequences, "repeats": 5}
    costs = {
        name: mathematics_s(loss, logprobs, by_group, **shared) for name, loss in LOSSES.items()
    }
    for name, cost_s in costs.items():
        add_cost(table, f"{name}, group advantages", cost_s, model_s)
    critic_s = mathematics_s(losses.double_sided, logprobs, by_critic, **shared)
    add_cost(table, "double_sided, advantages of a critic", critic_s, model_s)


def add_cost(table: Table, what: str, cost_s: float, model_s: float) -> None:
    """Print the time of the mathematics and its share."""
    table.row(
        f"{what} [ms]",
        f"{1e3 * cost_s:.1f} ({cost_s / model_s:.2%})",
        bar=f"at most {MOST_FRAC:.0%} of the model",
        holds=cost_s <= MOST_FRAC * model_s,
    )


def add_equalities(table: Table, *, quick: bool) -> None:
    """Compare gradients packed and not, and steps of one process and of four."""
    batch = shared_batch()
    chosen = ["icepop"] if quick else list(LOSSES)
    for name in chosen:
        packed, alone = (
            gradients_of(LOSSES[name], batch, is_packed=is_packed) for is_packed in (True, False)
        )
        largest = max(float(gradient.abs().max()) for gradient in packed.values())
        gap = largest_gap(packed, alone) if largest > 0 else math.inf  # nothing was compared
        add_gap(table, f"gradients (up to {largest:.1e}) packed and alone, {name}", gap)
    with contextlib.closing(GradientPool(NUM_PROCESSES)) as pool:
        for name in chosen:
            one = weights_after(LOSSES[name], batch, in_this_process)
            four = weights_after(LOSSES[name], batch, pool.open)
            what = f"weights after a step of {NUM_PROCESSES} processes and of 1, {name}"
            add_gap(table, what, largest_gap(one, four))


def add_gap(table: Table, what: str, gap: float) -> None:
    """Print a difference and whether it is small enough."""
    table.row(
        f"{what}, largest difference", f"{gap:.1e}", bar=f"<= {MOST_GAP:.0e}", holds=gap <= MOST_GAP
    )


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, default=1, help="compute threads")
    parser.add_argument(
        "--repeats", type=positive, default=1, help="passes of the model; the best counts"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, one loss: does it run at all?"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} thread(s), load average before {os.getloadavg()[0]:.1f}")
    table = Table()
    add_costs(table, options)
    add_equalities(table, quick=options.quick)
    table.close()


if __name__ == "__main__":
    main()
