"""Draft depths for a finished model: how many tokens a chain of drafts is worth under each loss.

Every arm starts from the same checkpoint of a finished run, which is only read, gives it the same new MTP layer
and trains that alone on the same demonstrations for the same steps, as a stage ``mtp`` does. Then all are measured on
demonstrations that neither the run nor the arms have seen: the expected accepted drafts of a chain
(``sum_j prod_{i<=j} sum_v min(p, q)``, rejection sampling at temperature 1) and the main model's own token.

Usage: python benchmarks/drafts.py [--run runs/quickstart] [--stage sft] [--steps 300] [--depths 3] [--quick]
"""

import argparse
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import Table

from longarc.config.recipe import Recipe
from longarc.config.stages import MtpLoss, SftConfig
from longarc.config.training import OptimizerConfig
from longarc.data.sft import ExpertShare
from longarc.errors import LongArcError
from longarc.models.add_mtp import with_mtp
from longarc.models.decoder_base import Decoder
from longarc.models.threads import set_compute_threads
from longarc.pipeline.demonstrations import StepConversations
from longarc.pipeline.preflight import expert
from longarc.pipeline.workspace import (
    TOKENIZER_FILE,
    Loaded,
    chat_format,
    load_checkpoint,
    task_family,
)
from longarc.runs.directory import RunDirectory
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.draft_objective import DraftObjective, DraftSums
from longarc.trainer.packing import pack_shared
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer

UNSEEN = 1_000_000
"""Number of the first demonstration that is measured, behind all that any stage shows."""
TRAINED = 500_000
"""Number of the first that the arms train on."""
MICRO_BATCH_TOKENS = 8192
PER_STEP = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train the drafts."""

    name: str
    loss: MtpLoss
    start: str = "last_layer"
    cross_entropy_frac: float = 0.0
    """Part of the steps that learn from cross-entropy first."""


ARMS = (
    Arm(name="cross-entropy", loss="cross_entropy"),
    Arm(name="cross-entropy, random start", loss="cross_entropy", start="random"),
    Arm(name="single-step TV", loss="single_step_tv"),
    Arm(name="end-to-end TV", loss="end_to_end_tv"),
    Arm(
        name="a third cross-entropy, then end-to-end TV",
        loss="end_to_end_tv",
        cross_entropy_frac=1 / 3,
    ),
)


def demonstrations(run_dir: Path, recipe: Recipe, stage: str, first: int) -> StepConversations:
    """Return the demonstrations of a run's sft stage from number ``first`` on."""
    config = recipe.stages[stage]
    if not isinstance(config, SftConfig):
        raise LongArcError(
            f"stage {stage!r} is no sft stage; its demonstrations are what is drafted"
        )
    experts = {
        name: ExpertShare(
            expert=expert(stage, name, task_family(recipe, name, share)),
            share_frac=share.share_frac,
        )
        for name, share in config.tasks.items()
    }
    tokenizer = Tokenizer.load(run_dir / TOKENIZER_FILE)
    return StepConversations(
        experts,
        chat_format(recipe.tokenizer.chat_format, tokenizer),
        conversations_per_step=PER_STEP,
        error_frac=config.error_frac,
        max_tokens=MICRO_BATCH_TOKENS,
        first=first,
        seed=recipe.seed,
    )


def train(
    loaded: Loaded, arm: Arm, documents: StepConversations, options: argparse.Namespace
) -> Decoder:
    """Give the model drafts and train them."""
    model = with_mtp(loaded.model, num_depths=options.depths, start=arm.start, seed=options.seed)  # type: ignore[arg-type]
    trainer = SupervisedTrainer(
        model,
        SupervisedSettings(
            optimizer=OptimizerConfig(
                lr=options.lr, momentum=0.8, warmup_steps=2, schedule="cosine"
            ),
            num_steps=options.steps,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            mode="mtp",
            attention=loaded.attention,
            indexer_stride=3,
            router_bias_rate=0.01,
            drafts=DraftObjective(
                loss=arm.loss, cross_entropy_steps=int(options.steps * arm.cross_entropy_frac)
            ),
        ),
    )
    for step in range(options.steps):
        trainer.step(documents(step))
    return model


@torch.no_grad()
def measure(
    model: Decoder, loaded: Loaded, documents: StepConversations, num_steps: int
) -> DraftSums:
    """Add up how good the drafts are on demonstrations that nobody has seen."""
    objective = DraftObjective(loss="end_to_end_tv")
    total: DraftSums | None = None
    for step in range(num_steps):
        for micro_batch in pack_shared(documents(step), micro_batch_tokens=MICRO_BATCH_TOKENS):
            hidden = model(
                micro_batch.token_ids, micro_batch.layout, attention=loaded.attention
            ).hidden
            _, sums = objective.terms(
                model, hidden, micro_batch, step=0, is_sparse=loaded.attention == "sparse"
            )
            if total is None:
                total = replace(sums)
            else:
                total.add(sums)
    assert total is not None
    return total


def accept_length(sums: DraftSums) -> float:
    """Return the tokens that a chain is worth, the main model's own included."""
    return 1 + sums.num_accepted / sums.num_chains


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; --quick makes everything small."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="a finished run")
    parser.add_argument("--stage", default="sft", help="whose final checkpoint gets drafts")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each arm")
    parser.add_argument("--depths", type=int, default=3, help="tokens to draft one after another")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the new layer")
    parser.add_argument("--arms", type=int, nargs="+", help="numbers of the arms, from 0")
    parser.add_argument("--quick", action="store_true", help="two steps: does it run at all?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps = 2
    return options


def main() -> None:
    """Train every arm and print the table."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = parse()
    set_compute_threads(1)
    run = RunDirectory.look(options.run)
    final = run.stage(options.stage).final()
    if final is None:
        raise LongArcError(f"stage {options.stage!r} of {options.run} is not finished")
    recipe = Recipe.model_validate(run.recipe())
    lengths: dict[str, float] = {}
    table = Table()
    for arm in [ARMS[i] for i in options.arms] if options.arms else ARMS:
        loaded = load_checkpoint(final)
        started_s = time.perf_counter()
        model = train(loaded, arm, demonstrations(options.run, recipe, "sft", TRAINED), options)
        elapsed_s = time.perf_counter() - started_s
        unseen = demonstrations(options.run, recipe, "sft", UNSEEN)
        sums = measure(model, loaded, unseen, 2 if options.quick else 20)
        lengths[arm.name] = accept_length(sums)
        shares = ", ".join(
            f"{a / n:.3f}" for a, n in zip(sums.acceptance, sums.num_drafts, strict=True)
        )
        nats = ", ".join(f"{a / n:.2f}" for a, n in zip(sums.nll, sums.num_drafts, strict=True))
        table.row(
            f"{arm.name}: accept length [tokens]",
            f"{lengths[arm.name]:.3f} (accepted {shares}; {nats} nats; {elapsed_s:.0f} s)",
        )
    table.close()


if __name__ == "__main__":
    main()
