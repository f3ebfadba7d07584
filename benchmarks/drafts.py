"""Draft depths for a finished model: how many tokens a chain of drafts is worth under each loss.

Every arm starts from the same checkpoint of a finished run, which is only read, gives it the same new MTP layer
and trains that alone on the same demonstrations for the same steps, as a stage ``mtp`` does. Then all are measured on
demonstrations that neither the run nor the arms have seen: the expected accepted drafts of a chain
(``sum_j prod_{i<=j} sum_v min(p, q)``, rejection sampling at temperature 1) and the main model's own token.

Then the engine drafts four tokens with the end-to-end arm (``speculation.py``): how long chains really are, and the gain in
time at batch 1, 2 and 4; also with a model of 12 layers, which is the checkpoint's with eight layers behind its own that
say nothing at first, trained on for ``--deep-steps`` as the ``sft`` stage trains, and then given drafts like the arms.

Usage: python benchmarks/drafts.py [--run runs/quickstart] [--stage sft] [--steps 240] [--depths 3] [--quick]

With ``--keep DIR`` what was trained lies there afterwards, and is not trained again: train whenever, measure the gain in
time on an idle machine.
"""

import argparse
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import Table, natural, positive
from speculation import DEEP, add_length_rows, add_speed_rows, deepened, tasks_of

from longarc.config.recipe import Recipe
from longarc.config.recorded import read_recorded
from longarc.config.stages import MtpLoss, SftConfig
from longarc.config.training import OptimizerConfig
from longarc.data.sft import ExpertShare
from longarc.errors import LongArcError
from longarc.models.add_mtp import with_mtp
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights, save_weights
from longarc.models.threads import set_compute_threads
from longarc.pipeline.demonstrations import StepConversations
from longarc.pipeline.preflight import expert
from longarc.pipeline.workspace import (
    TOKENIZER_FILE,
    Loaded,
    load_checkpoint,
    task_family,
)
from longarc.records.metric import combine
from longarc.runs.directory import RunDirectory
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.formats import make_chat_format
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
MEASURED_STEPS = 20
"""As many times the demonstrations of a step are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train the drafts."""

    name: str
    loss: MtpLoss
    cross_entropy_frac: float = 0.0
    """Part of the steps that learn from cross-entropy first."""


TEXT = Arm(name="cross-entropy", loss="cross_entropy")
END_TO_END = Arm(name="end-to-end TV", loss="end_to_end_tv", cross_entropy_frac=1 / 3)
ARMS = (
    TEXT,
    Arm(name="single-step TV", loss="single_step_tv", cross_entropy_frac=1 / 3),
    END_TO_END,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The checkpoint that all arms start from, and where demonstrations come from."""

    checkpoint: Path
    run_dir: Path
    recipe: Recipe
    sft: str
    """The stage whose demonstrations are drafted."""

    def demonstrations(self, first: int) -> StepConversations:
        """Return the demonstrations from number ``first`` on."""
        config = self.recipe.stages[self.sft]
        assert isinstance(config, SftConfig)
        experts = {
            name: ExpertShare(
                expert=expert(self.sft, name, task_family(self.recipe, name, share)),
                share_frac=share.share_frac,
            )
            for name, share in config.tasks.items()
        }
        return StepConversations(
            experts,
            self._format(),
            conversations_per_step=PER_STEP,
            error_frac=config.error_frac,
            max_tokens=MICRO_BATCH_TOKENS,
            first=first,
            seed=self.recipe.seed,
        )

    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer."""
        return self._format().stop_ids

    def _format(self) -> ChatFormat:
        tokenizer = Tokenizer.load(self.run_dir / TOKENIZER_FILE)
        return make_chat_format(self.recipe.tokenizer.chat_format, tokenizer)


def load_start(run_dir: Path, stage: str) -> Start:
    """Find the checkpoint and the demonstrations in a run.

    Raises:
        LongArcError: there is no such run, the stage is not finished, or the run has no sft stage.
    """
    run = RunDirectory.look(run_dir)
    checkpoint = run.stage(stage).final()
    recipe = read_recorded(run.recipe(), source=str(run.path)).recipe
    sft = [name for name, config in recipe.stages.items() if isinstance(config, SftConfig)]
    if checkpoint is None or not sft:
        raise LongArcError(f"{run_dir}: stage {stage!r} is not finished, or there is no sft stage")
    return Start(checkpoint=checkpoint, run_dir=run_dir, recipe=recipe, sft=sft[0])


def train(
    loaded: Loaded, arm: Arm, documents: StepConversations, options: argparse.Namespace
) -> GlmMoeDsa:
    """Give the model drafts and train them, unless that was kept."""
    model = with_mtp(loaded.model, num_depths=options.depths, seed=options.seed)
    _train_or_load(
        model,
        lambda: _train_drafts(model, loaded, arm, documents, options),
        loaded,
        options,
        arm.name,
    )
    return model


def _train_drafts(
    model: GlmMoeDsa,
    loaded: Loaded,
    arm: Arm,
    documents: StepConversations,
    options: argparse.Namespace,
) -> None:
    settings = replace(
        _settings(loaded, lr=options.lr, num_steps=options.steps),
        mode="mtp",
        drafts=DraftObjective(
            loss=arm.loss, cross_entropy_steps=int(options.steps * arm.cross_entropy_frac)
        ),
    )
    trainer = SupervisedTrainer(model, settings)
    for step in range(options.steps):
        trainer.step(documents(step))


def train_deep(loaded: Loaded, documents: StepConversations, options: argparse.Namespace) -> Loaded:
    """Return the checkpoint with a model of more layers, which were trained along with the others, unless it was kept."""
    assert isinstance(loaded.model, GlmMoeDsa)
    model = deepened(loaded.model, DEEP, seed=options.seed)
    _train_or_load(
        model, lambda: _train_layers(model, loaded, documents, options), loaded, options, "layers"
    )
    return replace(loaded, model=model)


def _train_layers(
    model: GlmMoeDsa, loaded: Loaded, documents: StepConversations, options: argparse.Namespace
) -> None:
    trainer = SupervisedTrainer(
        model, _settings(loaded, lr=options.deep_lr, num_steps=options.deep_steps)
    )
    for step in range(options.deep_steps):
        report = trainer.step(documents(step))
        if step in (0, options.deep_steps - 1):
            print(
                f"{DEEP} layers, step {step}: {combine(list(report.metrics))['loss/lm_nats']:.4f} nats"
            )


def _train_or_load(
    model: GlmMoeDsa,
    trains: Callable[[], None],
    loaded: Loaded,
    options: argparse.Namespace,
    what: str,
) -> None:
    """Train the model, or take what an earlier call kept of the same checkpoint under the same options."""
    if options.keep is None:
        trains()
        return
    of_training = ("steps", "depths", "lr", "deep_steps", "deep_lr", "seed")
    told = [
        what,
        str(model.config.num_hidden_layers),
        loaded.manifest.model_dump_json(),
        *(f"{name}={getattr(options, name)}" for name in of_training),
    ]
    name = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    path = options.keep / f"{what.replace(' ', '-').lower()}-{name}.safetensors"
    if path.exists():
        load_weights(model, path)
        return
    trains()
    options.keep.mkdir(parents=True, exist_ok=True)
    save_weights(model, path)


def _settings(loaded: Loaded, *, lr: float, num_steps: int) -> SupervisedSettings:
    return SupervisedSettings(
        optimizer=OptimizerConfig(lr=lr, momentum=0.8, warmup_steps=2, schedule="cosine"),
        num_steps=num_steps,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        attention=loaded.attention,
        indexer_stride=3,
        router_bias_rate=0.01,
    )


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
    parser.add_argument("--steps", type=positive, default=240, help="optimizer steps of each arm")
    parser.add_argument(
        "--depths", type=positive, default=3, help="tokens to draft one after another"
    )
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate")
    parser.add_argument(
        "--deep-steps", type=positive, default=60, help="optimizer steps of the deep model"
    )
    parser.add_argument("--deep-lr", type=float, default=1e-3, help="its learning rate")
    parser.add_argument("--tasks", type=positive, default=48, help="tasks that the engine answers")
    parser.add_argument("--repeats", type=positive, default=5, help="turns with and without drafts")
    parser.add_argument(
        "--skip-losses", action="store_true", help="leave out the arms that the engine does not use"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="directory of what was trained: it is kept there and not trained again",
    )
    parser.add_argument("--seed", type=natural, default=0, help="of the new layer")
    parser.add_argument("--quick", action="store_true", help="two steps: does it run at all?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.deep_steps, options.tasks, options.repeats = 2, 2, 4, 1
    return options


def add_rows(table: Table, results: dict[str, DraftSums]) -> None:
    """Print what each arm's drafts are worth, and whether a TV loss beat cross-entropy."""
    for name, sums in results.items():
        shares, nats = (
            ", ".join(
                f"{total / count:.{digits}f}"
                for total, count in zip(totals, sums.num_drafts, strict=True)
            )
            for totals, digits in ((sums.acceptance, 3), (sums.nll, 2))
        )
        table.row(f"{name}: accept length [tokens]", f"{accept_length(sums):.3f}")
        table.row(f"{name}: accepted, by depth [share]; cross-entropy [nats]", f"{shares}; {nats}")
    if TEXT.name not in results:
        return
    text = accept_length(results[TEXT.name])
    best = max(accept_length(sums) for name, sums in results.items() if name != TEXT.name)
    table.row(
        "accept length, the best TV loss [tokens]",
        f"{best:.3f}",
        peer=f"{TEXT.name} {text:.3f}",
        ratio=best / text,
        bar="more than cross-entropy",
        holds=best > text,
    )


def main() -> None:
    """Train every arm and print the table."""
    # Waiting threads must sleep, not spin, while another process has the core (docs/ARCHITECTURE.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = parse()
    set_compute_threads(1)
    table = Table()
    try:
        start = load_start(options.run, options.stage)
    except LongArcError as error:
        print(f"{error}\nThis benchmark starts from a finished run: `make quickstart` makes one.")
        bar = "more than cross-entropy"
        table.row("accept length, the best TV loss [tokens]", "not measured", bar=bar, holds=False)
        table.close()
        return
    results, models = {}, {}
    for arm in [END_TO_END] if options.skip_losses else ARMS:
        loaded = load_checkpoint(start.checkpoint)
        model = train(loaded, arm, start.demonstrations(TRAINED), options)
        num_steps = 2 if options.quick else MEASURED_STEPS
        results[arm.name] = measure(model, loaded, start.demonstrations(UNSEEN), num_steps)
        models[arm.name] = model
    print(
        f"{options.steps} steps of {PER_STEP} demonstrations, {options.depths} depths, load average "
        f"{os.getloadavg()[0]:.1f}"
    )
    add_rows(table, results)
    add_engine_rows(table, start, models[END_TO_END.name], options)
    table.close()


def add_engine_rows(
    table: Table, start: Start, model: GlmMoeDsa, options: argparse.Namespace
) -> None:
    """Let the engine draft, with the model of the run and with a deep one."""
    unseen = start.demonstrations(UNSEEN)
    steps = range(-(-options.tasks // PER_STEP))
    documents = [document for step in steps for document in unseen(step)]
    tasks = tasks_of(documents[: options.tasks], start.stop_ids())
    loaded = load_checkpoint(start.checkpoint)
    add_length_rows(table, model, loaded.attention, tasks)
    add_speed_rows(table, model, loaded.attention, tasks, repeats=options.repeats)
    deep = train_deep(loaded, start.demonstrations(TRAINED), options)
    deep_model = train(deep, END_TO_END, start.demonstrations(TRAINED), options)
    add_length_rows(table, deep_model, loaded.attention, tasks)
    add_speed_rows(table, deep_model, loaded.attention, tasks, repeats=options.repeats)


if __name__ == "__main__":
    main()
