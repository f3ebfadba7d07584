"""Expert conversations as the documents of a step: all of sft, and a part of the stages before it."""

from collections.abc import Iterator, Mapping, Sequence

from longarc.config.recipe import Recipe
from longarc.config.stages import (
    DsaConfig,
    MidtrainConfig,
    MtpConfig,
    PretrainConfig,
    SftConfig,
    TaskShare,
)
from longarc.data.sft import (
    ExpertShare,
    RecordedExpert,
    check_recorded,
    conversation_document,
    conversations,
)
from longarc.pipeline.preflight import expert
from longarc.pipeline.supervised import Documents, config_total
from longarc.pipeline.text import StepDocuments, corpus_texts, document_stream
from longarc.pipeline.workspace import Workspace, family_object
from longarc.tokens.chat_format import ChatFormat
from longarc.trainer.packing import Document


def experts_of(
    workspace: Workspace, stage: str, tasks: Mapping[str, TaskShare]
) -> dict[str, ExpertShare]:
    """Return the experts of the families of a stage.

    Raises:
        ConfigError: a family has nothing to imitate.
    """
    return {
        name: ExpertShare(
            expert=expert(stage, name, family_object(workspace.recipe, name, share)),
            share_frac=share.share_frac,
        )
        for name, share in tasks.items()
    }


def text_and_demonstrations(
    workspace: Workspace,
    stage: str,
    config: PretrainConfig | MidtrainConfig | DsaConfig | MtpConfig,
    *,
    seed: int,
) -> Documents:
    """Return the documents of each step of a stage: its text, its demonstrations, or both."""
    shown = _demonstrations(workspace, stage, config, seed=seed)
    if config.corpus is None:
        assert shown is not None
        return shown
    stream = document_stream(
        corpus_texts(config.corpus, seed=seed),
        workspace.tokenizer(),
        context_tokens=config.context_tokens,
        long_share_frac=0.0 if isinstance(config, PretrainConfig) else config.long_share_frac,
        seed=seed,
    )
    text = StepDocuments(stream, tokens_per_step=config.tokens_per_step)
    if shown is None or config.demonstrations is None:
        return text
    return interleaved(text, shown, text_every_steps=config.demonstrations.text_every_steps)


def _demonstrations(
    workspace: Workspace,
    stage: str,
    config: PretrainConfig | MidtrainConfig | DsaConfig | MtpConfig,
    *,
    seed: int,
) -> Documents | None:
    if config.demonstrations is None:
        return None
    return StepConversations(
        experts_of(workspace, stage, config.demonstrations.tasks),
        workspace.chat_format(),
        conversations_per_step=config.demonstrations.conversations_per_step,
        error_frac=config.demonstrations.error_frac,
        max_tokens=config.micro_batch_tokens,
        first=num_shown_before(workspace.recipe, stage),
        seed=seed,
    )


def interleaved(text: Documents, shown: Documents, *, text_every_steps: int) -> Documents:
    """Return steps that hold both, or text in every n-th step and demonstrations in the others.

    What a step holds depends on its number alone, so that a resume reads what was to come.
    """
    if text_every_steps == 1:
        return lambda step: [*text(step), *shown(step)]
    return lambda step: (
        text(step // text_every_steps) if step % text_every_steps == 0 else shown(step)
    )


def num_shown_before(recipe: Recipe, stage: str) -> int:
    """Return how many demonstrations the stages before ``stage`` use at most, so that it shows none again."""
    total = 0
    for name, config in recipe.stages.items():
        if name == stage:
            break
        match config:
            case SftConfig():
                total += config.num_steps * config.conversations_per_step
            case PretrainConfig() | MidtrainConfig() | DsaConfig() | MtpConfig() if (
                config.demonstrations
            ):
                total += config_total(config) * config.demonstrations.conversations_per_step
    return total


class StepConversations:
    """The rendered demonstrations of each step, by step; going back costs a new start."""

    def __init__(
        self,
        experts: Mapping[str, ExpertShare],
        chat_format: ChatFormat,
        *,
        conversations_per_step: int,
        error_frac: float,
        max_tokens: int,
        first: int = 0,
        seed: int,
    ) -> None:
        """Keep the experts.

        Args:
            experts: who is imitated, and how often.
            chat_format: how a conversation becomes tokens.
            conversations_per_step: demonstrations in one optimizer step.
            error_frac: share of them with an error and its correction.
            max_tokens: a longer demonstration is an error [tokens].
            first: number of the first demonstration, behind those of earlier stages.
            seed: of the mixture.

        Raises:
            ConfigError: recorded conversations are too long; those that an expert makes are looked at when
                their turn comes.
        """
        for name, share in experts.items():
            if isinstance(share.expert, RecordedExpert):
                check_recorded(name, share.expert, chat_format, max_tokens=max_tokens)
        self._experts = experts
        self._format = chat_format
        self._per_step = conversations_per_step
        self._error_frac = error_frac
        self._max_tokens = max_tokens
        self._first = first
        self._seed = seed

    def __call__(self, step: int) -> Sequence[Document]:
        """Return the demonstrations of 0-based ``step``."""
        return list(self._read(step))

    def _read(self, step: int) -> Iterator[Document]:
        stream = conversations(
            self._experts,
            cursor=self._first + step * self._per_step,
            error_frac=self._error_frac,
            seed=self._seed,
        )
        for _ in range(self._per_step):
            document = conversation_document(
                next(stream), self._format, max_tokens=self._max_tokens
            )
            yield Document(token_ids=document.token_ids, train_mask=document.train_mask)
