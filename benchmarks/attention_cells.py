"""One cell of the attention study: a variant of a checkpoint, trained with one seed and scored.

A cell depends on its ``Study`` and nothing else, so that it can be computed in any process and kept on disk.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longarc.config.model import AttentionPattern
from longarc.config.stages import CorpusConfig
from longarc.config.training import OptimizerConfig
from longarc.data.needles import KINDS, NeedleTexts
from longarc.models.conversion import num_new_parameters, to_hybrid
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights, save_weights
from longarc.models.layout import Layout
from longarc.models.variants.hybrid import Hybrid
from longarc.pipeline.demonstrations import interleaved
from longarc.pipeline.needles import needle_document, score_kind
from longarc.pipeline.supervised import Documents
from longarc.pipeline.text import StepDocuments, corpus_texts, document_stream
from longarc.pipeline.workspace import load_checkpoint
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.alignment import AttentionAlignment
from longarc.trainer.packing import Document
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer

VARIANTS = ("full", "interleaved", "searched", "gdn", "simple-gdn", "dsa")
UNTRAINED = ("full", "interleaved", "searched")
"""Variants that are scored without training too: they need none to work."""


BASE_SEED = 1_000_000
"""Seed of the data that the common base trains on; no variant sees them again."""


SHORT_TOKENS = 256
"""Longest text of the first two thirds of the base's steps [tokens]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is compared, and how; what a cell depends on."""

    checkpoint: str
    tokenizer: str
    weights: str
    """Digest of the checkpoint's weights."""
    base_steps: int
    """Optimizer steps in which the checkpoint learns to find needles, before anything is compared."""
    window: int
    steps: int
    first_steps: int
    """Of them, those that align layers or warm indexers up."""
    context: int
    tokens_per_step: int
    lr: float
    lengths: tuple[int, ...]
    texts: int
    keys: int
    search_length: int
    beam: int
    rotates: bool
    base: str = ""
    """File of the weights that every variant starts from."""
    searched: str = ""
    """The pattern that was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One variant, trained with one seed."""

    variant: str
    seed: int | None
    """None: not trained."""

    @property
    def name(self) -> str:
        return f"{self.variant}/{'untrained' if self.seed is None else self.seed}"


def load(study: Study) -> tuple[Decoder, Tokenizer]:
    """Return what every variant starts from."""
    model = load_checkpoint(Path(study.checkpoint)).model
    if study.base:
        load_weights(model, study.base)
    return model, Tokenizer.load(Path(study.tokenizer))


def train_base(study: Study, path: Path) -> None:
    """Let the checkpoint learn to find needles, every layer attending to everything; write its weights."""
    torch.set_num_threads(1)
    model, tokenizer = load(study)
    trainer = SupervisedTrainer(
        model,
        SupervisedSettings(
            optimizer=OptimizerConfig(lr=6e-3, momentum=0.8, schedule="cosine", warmup_steps=3),
            num_steps=study.base_steps,
            micro_batch_tokens=max(8192, study.context),
            router_bias_rate=0.01,
        ),
    )
    # Key by key is learned on short texts; then the same has to be found farther and farther away.
    short = documents(study, tokenizer, BASE_SEED, max_tokens=SHORT_TOKENS)
    long = documents(study, tokenizer, BASE_SEED + 1)
    for step in range(study.base_steps):
        data = short if 3 * step < 2 * study.base_steps else long
        report = trainer.step(data(step))
        if (step + 1) % 50 == 0:
            loss = metric(report.metrics, "loss/lm_nats")
            print(f"base, step {step + 1} of {study.base_steps}: {loss:.2f} nats", flush=True)
    save_weights(model, path)


def pattern_of(variant: str, study: Study) -> AttentionPattern | None:
    """Return what the variant's layers are; None for the model as it is."""
    num_layers = len(study.searched)
    layers = {
        "full": "F" * num_layers,
        "interleaved": ("FS" * num_layers)[:num_layers],
        "searched": study.searched,
        "gdn": study.searched.replace("S", "G"),
        "simple-gdn": study.searched.replace("S", "D"),
        "dsa": None,
    }[variant]
    if layers is None:
        return None
    return AttentionPattern(layers=layers, window=study.window, rotates_delta=study.rotates)


def run_cell(study: Study, cell: Cell) -> dict[str, Any]:
    """Convert, train and score; in a process of its own, with one thread."""
    torch.set_num_threads(1)
    base, tokenizer = load(study)
    pattern = pattern_of(cell.variant, study)
    seed = 0 if cell.seed is None else cell.seed
    model = base if pattern is None else to_hybrid(base, pattern, seed=seed)
    result: dict[str, Any] = {"layers": "dsa" if pattern is None else pattern.layers}
    if cell.seed is not None:
        result |= train(model, base, study, seed, is_sparse=pattern is None)
    result["scores"] = score(model, tokenizer, study, is_sparse=pattern is None)
    longest = study.lengths[-1]
    result["prefill_s"] = prefill_s(model, longest, is_sparse=pattern is None)
    result["new_parameters"] = new_parameters(model)
    result["cache_bytes"] = cache_bytes(model, longest, study)
    return result


def documents(
    study: Study, tokenizer: Tokenizer, seed: int, *, max_tokens: int | None = None
) -> Documents:
    """Return the documents of each step: text in every eighth, else needles, of which the answers are trained.

    In one step with text they would not count: a text of 1,000 tokens has few that are looked up.

    Args:
        study: gives context and size of a step.
        tokenizer: of the model.
        seed: of the data.
        max_tokens: the longest text with needles; None: the context.
    """
    text = StepDocuments(
        document_stream(
            corpus_texts(CorpusConfig(max_bytes=4_000_000, copy_share_frac=0.6), seed=seed),
            tokenizer,
            context_tokens=study.context,
            seed=seed,
        ),
        tokens_per_step=study.tokens_per_step,
    )
    needles = NeedleTexts(
        seed=seed,
        num_tokens=(40, max_tokens or study.context),
        count_tokens=lambda text: len(tokenizer.encode(text)),
        num_keys=study.keys,
    )

    def shown(step: int) -> list[Document]:
        # Texts are numbered by their step, so that a step does not depend on how many others had.
        found: list[Document] = []
        while sum(len(d.token_ids) for d in found) < study.tokens_per_step:
            needle = needles.needle(step * 1000 + len(found))
            found.append(needle_document(needle, tokenizer))
        return found

    return interleaved(text, shown, text_every_steps=8)


def train(
    model: Decoder, teacher: Decoder, study: Study, seed: int, *, is_sparse: bool
) -> dict[str, Any]:
    """Train for the steps of the study; return losses and CPU times."""
    data = documents(study, Tokenizer.load(Path(study.tokenizer)), seed)
    optimizer = OptimizerConfig(lr=study.lr, momentum=0.8, schedule="cosine", warmup_steps=2)
    first = first_phase(model, teacher, study, optimizer, is_sparse=is_sparse)
    num_first = study.first_steps if first is not None else 0
    first_losses, first_s = timed(first, data, range(num_first)) if first is not None else ([], 0.0)
    trainer = SupervisedTrainer(
        model,
        SupervisedSettings(
            optimizer=optimizer,
            num_steps=study.steps - num_first,
            micro_batch_tokens=max(8192, study.context),
            attention="sparse" if is_sparse else "dense",
            router_bias_rate=0.01,
        ),
    )
    losses, step_s = timed(
        lambda batch: metric(trainer.step(batch).metrics, "loss/lm_nats"),
        data,
        range(num_first, study.steps),
    )
    return {
        "first_losses": first_losses,
        "losses": losses,
        "step_s": step_s,
        "first_step_s": first_s,
    }


def first_phase(
    model: Decoder,
    teacher: Decoder,
    study: Study,
    optimizer: OptimizerConfig,
    *,
    is_sparse: bool,
) -> Callable[[Sequence[Document]], float] | None:
    """Return a step of what a variant does before it trains on text; None where it does nothing."""
    if is_sparse:
        warmup = SupervisedTrainer(
            model,
            SupervisedSettings(
                optimizer=OptimizerConfig(lr=5e-3, weight_decay=0.0),
                num_steps=study.first_steps,
                micro_batch_tokens=max(8192, study.context),
                mode="indexer_warmup",
                router_bias_rate=0.0,
            ),
        )
        return lambda batch: metric(warmup.step(batch).metrics, "loss/indexer_kl_nats")
    layers = [i for i, letter in enumerate(letters(model)) if letter in "GD"]
    if not layers:
        return None
    alignment = AttentionAlignment(
        model,
        teacher,
        layers,
        optimizer=optimizer,
        num_steps=study.first_steps,
        micro_batch_tokens=max(8192, study.context),
    )
    return lambda batch: metric(alignment.step(batch), "loss/alignment")


def timed(
    step: Callable[[Sequence[Document]], float], data: Documents, numbers: range
) -> tuple[list[float], float]:
    """Take steps; return their losses and the CPU time of one, without that of its data [s]."""
    losses, elapsed_s = [], 0.0
    for number in numbers:
        batch = data(number)
        started = time.process_time()
        losses.append(step(batch))
        elapsed_s += time.process_time() - started
    return losses, elapsed_s / len(numbers)


def letters(model: Decoder) -> str:
    pattern: AttentionPattern | None = getattr(model.config, "pattern", None)
    return "" if pattern is None else pattern.layers


def metric(metrics: Sequence[Any], name: str) -> float:
    return next(m.total / m.weight for m in metrics if m.name == name)


def score(
    model: Decoder, tokenizer: Tokenizer, study: Study, *, is_sparse: bool
) -> dict[str, dict[str, float]]:
    """Return the share of right answers by length and kind."""
    return {
        str(length): {
            kind: score_kind(
                model,
                tokenizer,
                kind,
                context_tokens=length,
                num_texts=study.texts,
                num_keys=study.keys,
                attention="sparse" if is_sparse else "dense",
            ).right_frac
            for kind in KINDS
        }
        for length in study.lengths
    }


@torch.inference_mode()
def prefill_s(model: Decoder, length: int, *, is_sparse: bool) -> float:
    """Return the shortest of three passes over one text [CPU s]."""
    ids = torch.arange(length) % model.config.vocab_size
    times = []
    for _ in range(3):
        started = time.process_time()
        model(ids, Layout.documents([length]), attention="sparse" if is_sparse else "dense")
        times.append(time.process_time() - started)
    return min(times)


def new_parameters(model: Decoder) -> int:
    """Count what plain attention does not have."""
    indexers = sum(p.numel() for n, p in model.named_parameters() if "indexer" in n.split("."))
    return num_new_parameters(model) + indexers


def cache_bytes(model: Decoder, length: int, study: Study) -> int:
    """Return what a sequence needs in the cache [bytes]: a window keeps its rows alone, a memory stays as it is."""
    width, size = sum(model.cache_widths().values()), model.output_weight.element_size()
    if not isinstance(model, Hybrid):
        return len(model.model.layers) * length * width * size
    memories = model.memories()
    total = sum(4 * memory.num_values for memory in memories.values())
    for letter in letters(model):
        if letter in "FS":
            rows = min(length, study.window) if letter == "S" else length
            total += rows * width * size
    return total
