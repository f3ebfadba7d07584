"""Which layers of a checkpoint can do without an indexer: documents to measure on, and the measure.

The documents are drawn like those of the run's text stages, in an order that training did not see.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from longarc.config.model import GlmMoeDsaConfig
from longarc.config.recipe import Recipe
from longarc.config.stages import DsaConfig, MidtrainConfig, PretrainConfig
from longarc.errors import ConfigError
from longarc.models.decoder_base import Decoder, ForwardOutput
from longarc.models.index_share import SharingStep, search_shared_layers
from longarc.models.projection import token_logprobs
from longarc.pipeline.stage_checkpoint import final_checkpoint
from longarc.pipeline.text import StepDocuments, corpus_texts, document_stream
from longarc.pipeline.workspace import TOKENIZER_FILE, load_checkpoint
from longarc.runs.directory import RunDirectory
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.packing import Document, pack_shared

CALIBRATION_SEED = 1 << 20
"""Added to the recipe's seed: stages add small numbers."""


def search_run(
    recipe: Recipe, run: RunDirectory, stage: str, *, keep_frac: float, num_tokens: int
) -> Iterator[SharingStep]:
    """Search the layers of a stage's final checkpoint, whose attention has to be sparse.

    Args:
        recipe: of the run.
        run: holds checkpoint and tokenizer.
        stage: whose checkpoint.
        keep_frac: share of its layers that keep an indexer; at least one does.
        num_tokens: size of the calibration data [tokens].

    Raises:
        CheckpointError: the stage is not finished.
        ConfigError: there is no such training stage, its attention is dense, or nothing in the run says on which text to measure.
    """
    loaded = load_checkpoint(final_checkpoint(recipe, run, stage))
    config = loaded.model.config
    if not isinstance(config, GlmMoeDsaConfig) or loaded.attention == "dense":
        raise ConfigError(
            f"stage {stage!r} attends densely, so that no indexer selects anything; name the dsa stage or one "
            f"behind it"
        )
    text = text_config(recipe, stage)
    if text.context_tokens <= config.index_topk:
        raise ConfigError(
            f"documents of context_tokens={text.context_tokens} are read whole with index_topk="
            f"{config.index_topk}, so that sharing changes nothing; search in a run with longer documents"
        )
    documents = calibration_documents(
        text,
        Tokenizer.load(run.path / TOKENIZER_FILE),
        num_tokens=num_tokens,
        seed=recipe.seed + CALIBRATION_SEED,
    )
    num_full = max(1, round(keep_frac * config.num_hidden_layers))
    return search_shared_layers(loaded.model, loss_on(documents), num_full=num_full)


def text_config(recipe: Recipe, stage: str) -> PretrainConfig | MidtrainConfig | DsaConfig:
    """Return the settings of the last text stage up to ``stage``.

    Raises:
        ConfigError: there is none.
    """
    found: PretrainConfig | MidtrainConfig | DsaConfig | None = None
    for name, config in recipe.stages.items():
        if isinstance(config, PretrainConfig | MidtrainConfig | DsaConfig):
            found = config
        if name == stage:
            break
    if found is None:
        raise ConfigError(
            f"recipe {recipe.name!r} reads no text before or in stage {stage!r}, so nothing says what to measure "
            f"on; name a stage behind a pretrain, midtrain or dsa stage"
        )
    return found


def calibration_documents(
    config: PretrainConfig | MidtrainConfig | DsaConfig,
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    seed: int,
) -> Sequence[Document]:
    """Return documents like those of a text stage, of ``num_tokens`` together or a little more."""
    stream = document_stream(
        corpus_texts(config.corpus, seed=seed),
        tokenizer,
        context_tokens=config.context_tokens,
        long_share_frac=0.0 if isinstance(config, PretrainConfig) else config.long_share_frac,
        seed=seed,
    )
    return StepDocuments(stream, tokens_per_step=num_tokens)(0)


def loss_on(
    documents: Sequence[Document], *, micro_batch_tokens: int = 8192
) -> Callable[[Decoder], float]:
    """Return a function that gives the mean loss of a model over the trained tokens, sparsely attending [nats]."""
    longest = max(len(document.token_ids) for document in documents)
    batches = pack_shared(documents, micro_batch_tokens=max(micro_batch_tokens, longest))

    @torch.no_grad()
    def loss(model: Decoder) -> float:
        total, count = 0.0, 0
        for batch in batches:
            output: ForwardOutput = model(batch.token_ids, batch.layout, attention="sparse")
            logprobs, _ = token_logprobs(
                output.hidden[batch.source_rows], model.output_weight, batch.target_ids
            )
            total -= logprobs.double().sum().item()
            count += len(logprobs)
        return total / max(count, 1)

    return loss
