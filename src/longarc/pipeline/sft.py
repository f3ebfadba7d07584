"""Stage ``sft``: imitate experts; their mistakes stay in context and are not imitated."""

from collections.abc import Iterator, Sequence

from longarc.config.stages import SftConfig
from longarc.data.sft import ExpertShare, conversation_document, conversations
from longarc.pipeline.preflight import expert
from longarc.pipeline.supervised import train_supervised
from longarc.pipeline.workspace import Workspace
from longarc.tokens.chat_format import ChatFormat
from longarc.trainer.packing import Document
from longarc.trainer.supervised import SupervisedSettings


async def run(workspace: Workspace, stage: str, config: SftConfig) -> None:
    """Train on demonstrations of every family in its share."""
    loaded = workspace.load(workspace.input_checkpoint(stage))
    experts: dict[str, ExpertShare] = {}
    for name, family in workspace.families(config.tasks).items():
        experts[name] = ExpertShare(
            expert=expert(stage, name, family), share_frac=config.tasks[name].share_frac
        )
    is_sparse = loaded.attention == "sparse"
    await train_supervised(
        workspace,
        stage=stage,
        config=config,
        settings=SupervisedSettings(
            optimizer=config.optimizer,
            num_steps=config.num_steps,
            micro_batch_tokens=config.micro_batch_tokens,
            attention=loaded.attention,
            indexer_loss_coeff=config.indexer_loss_coeff if is_sparse else 0.0,
            indexer_stride=config.indexer_stride,
            router_bias_rate=config.router_bias_rate,
        ),
        model=loaded.model,
        policy_version=loaded.manifest.policy_version,
        documents=_StepConversations(
            experts,
            workspace.chat_format(),
            config=config,
            seed=workspace.recipe.seed,
        ),
    )


class _StepConversations:
    """The rendered demonstrations of each step, by step."""

    def __init__(
        self,
        experts: dict[str, ExpertShare],
        chat_format: ChatFormat,
        *,
        config: SftConfig,
        seed: int,
    ) -> None:
        self._experts = experts
        self._format = chat_format
        self._config = config
        self._seed = seed
        self._next_step = 0
        self._reader = self._open()

    def __call__(self, step: int) -> Sequence[Document]:
        if step < self._next_step:
            self._reader, self._next_step = self._open(), 0
        while self._next_step < step:
            self._take()
        return self._take()

    def _open(self) -> Iterator[Document]:
        stream = conversations(
            self._experts, cursor=0, error_frac=self._config.error_frac, seed=self._seed
        )
        for conversation in stream:
            document = conversation_document(
                conversation, self._format, max_tokens=self._config.micro_batch_tokens
            )
            yield Document(token_ids=document.token_ids, train_mask=document.train_mask)

    def _take(self) -> list[Document]:
        self._next_step += 1
        return [next(self._reader) for _ in range(self._config.conversations_per_step)]
