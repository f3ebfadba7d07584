"""What sparse attention costs in quality: held-out loss and recall before and after stage ``dsa`` of a finished run.

* dense: the checkpoint that stage ``dsa`` started from, which attends to everything.
* sparse: the checkpoint that it ended with, which attends to the keys its indexer selects.
* dense again: that same checkpoint, attending to everything; between the two lies the selection alone.

The bars hold against both: the stage may have read text that helped, and may not hide a loss behind it.

The loss is that of text which no stage has read: held-out files of the corpus and new copy-rich text, in documents as
long as those of the stage. A needle is the code of a held-out ``recall`` task in a context of 4 times ``index_topk``;
it is found where the model gives every token of the answer the highest probability, so that sampling at
temperature 0 would write it. Nothing in the run directory is changed.

Usage: python benchmarks/sparse_quality.py [--run runs/quickstart] [--stage dsa] [--needles 1000] [--quick]
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Table, positive

from longarc.config.model import GlmMoeDsaConfig
from longarc.config.recorded import read_recorded
from longarc.config.stages import DsaConfig
from longarc.data.corpora import passages, read_corpus
from longarc.data.documents import Document, MixedTexts, ShuffledTexts, StreamCursor
from longarc.data.sft import conversation_document
from longarc.data.synthetic import CopyTexts
from longarc.envs.tasks.recall import Recall
from longarc.errors import ConfigError, LongArcError
from longarc.models.layout import Layout
from longarc.models.projection import project_logits, token_logprobs
from longarc.pipeline.text import PASSAGE_BYTES, document_stream
from longarc.pipeline.workspace import (
    TOKENIZER_FILE,
    Attention,
    Loaded,
    load_checkpoint,
)
from longarc.records.conversation import Conversation
from longarc.records.message import Message, Role
from longarc.runs.directory import RunDirectory
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.formats import make_chat_format
from longarc.tokens.tokenizer import Tokenizer

MAX_LOSS_RATIO = 1.01
MAX_RECALL_LOSS = 0.02
BAR_NEEDLES = 1000
"""With fewer needles the bar on recall says nothing and is missed."""
CONTEXT_RATIO = 4
"""Context of a needle, in multiples of the keys that a query attends to."""
_CHAT_TOKENS = 60
"""Question, answer and chat format around a haystack; a little more than they need."""
_HELD_OUT_SEED = 1_000_003
_PACKED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Start:
    """The two checkpoints, and what the stage between them read."""

    before: Loaded
    after: Loaded
    config: DsaConfig
    tokenizer: Tokenizer
    num_selected: int

    def chat_format(self) -> ChatFormat:
        return make_chat_format(str(self.after.manifest.info["chat_format"]), self.tokenizer)


def read_run(path: Path, stage: str) -> Start:
    """Load what is compared.

    Raises:
        LongArcError: there is no such run, or the stage is not a finished ``dsa``.
    """
    run = RunDirectory.look(path)
    recipe = read_recorded(run.recipe(), source=str(path)).recipe
    config = recipe.stages.get(stage)
    if not isinstance(config, DsaConfig):
        raise ConfigError(
            f"{path} has no stage {stage!r} of kind dsa; it has {list(recipe.stages)}"
        )
    names = [name for name, other in recipe.stages.items() if other.kind != "eval"]
    previous = names[names.index(stage) - 1] if names[0] != stage else "initial"
    loaded = []
    for name in (previous, stage):
        final = run.stage(name).final()
        if final is None:
            raise ConfigError(f"stage {name!r} of {path} is not finished; resume the run first")
        loaded.append(load_checkpoint(final))
    model = loaded[1].model.config
    assert isinstance(model, GlmMoeDsaConfig)
    tokenizer = Tokenizer.load(path / TOKENIZER_FILE)
    return Start(loaded[0], loaded[1], config, tokenizer, model.num_selected)


def held_out_documents(start: Start, count: int) -> list[Document]:
    """Return documents of text that no stage has read."""
    corpus = start.config.corpus
    real = read_corpus(max_bytes=corpus.max_bytes, split="held_out")
    texts = MixedTexts(
        ShuffledTexts(passages(real, passage_bytes=PASSAGE_BYTES), seed=_HELD_OUT_SEED),
        CopyTexts(seed=_HELD_OUT_SEED),
        share_frac=corpus.copy_share_frac,
    )
    stream = document_stream(
        texts, start.tokenizer, context_tokens=start.config.context_tokens, seed=_HELD_OUT_SEED
    )
    return [document for document, _ in itertools.islice(stream.read(StreamCursor()), count)]


def needles(start: Start, count: int) -> list[Document]:
    """Return held-out recall tasks with their answers; the mask marks the answer."""
    longest = CONTEXT_RATIO * start.num_selected
    family = Recall(
        count_tokens=lambda text: len(start.tokenizer.encode(text)),
        task_tokens=(longest - _CHAT_TOKENS - 40, longest - _CHAT_TOKENS),
        num_test_tasks=count,
    )
    chat = start.chat_format()
    return [
        conversation_document(
            Conversation(
                messages=(
                    *task.messages,
                    Message(role=Role.ASSISTANT, content=f"code: {(task.data or {})['code']}"),
                ),
                thinking=family.thinking,
                family=family.name,
                difficulty=task.difficulty,
            ),
            chat,
            max_tokens=longest,
        )
        for task in itertools.islice(family.tasks("test", cursor=0), count)
    ]


def packs(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Put documents together until a forward pass is full."""
    pack: list[Document] = []
    for document in documents:
        if pack and sum(len(d.token_ids) for d in pack) + len(document.token_ids) > _PACKED_TOKENS:
            yield pack
            pack = []
        pack.append(document)
    yield pack


@torch.no_grad()
def predictions(
    loaded: Loaded, attention: Attention, pack: Sequence[Document]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the hidden state before each predicted token, that token, and whether it is trained on."""
    ids = torch.tensor([token for document in pack for token in document.token_ids])
    lengths = [len(document.token_ids) for document in pack]
    hidden = loaded.model(ids, Layout.documents(lengths), attention=attention).hidden
    ends = torch.tensor(lengths).cumsum(0) - 1
    sources = torch.ones(len(ids), dtype=torch.bool)
    sources[ends] = False
    mask = torch.tensor([flag for document in pack for flag in document.train_mask])
    at = sources.nonzero()[:, 0]
    return hidden[at], ids[at + 1], mask[at + 1]


@torch.no_grad()
def mean_loss(loaded: Loaded, attention: Attention, documents: Sequence[Document]) -> float:
    """Return the cross-entropy per token [nats]."""
    total, count = 0.0, 0
    for pack in packs(documents):
        hidden, targets, _ = predictions(loaded, attention, pack)
        logprobs, _ = token_logprobs(hidden, loaded.model.output_weight, targets)
        total -= float(logprobs.double().sum())
        count += len(targets)
    return total / count


def found_frac(loaded: Loaded, attention: Attention, documents: Sequence[Document]) -> float:
    """Return the share of documents whose every answer token is the most probable one."""
    num_found = 0
    for pack in packs(documents):
        hidden, targets, is_answer = predictions(loaded, attention, pack)
        best = project_logits(hidden[is_answer], loaded.model.output_weight).argmax(dim=1)
        is_right = best == targets[is_answer]
        lengths = [sum(document.train_mask) for document in pack]
        num_found += sum(bool(part.all()) for part in is_right.split(lengths))
    return num_found / len(documents)


def add_rows(table: Table, start: Start, *, num_documents: int, num_needles: int) -> None:
    """Measure and print."""
    text, tasks = held_out_documents(start, num_documents), needles(start, num_needles)
    sides: list[tuple[Loaded, Attention]] = [
        (start.before, "dense"),
        (start.after, "sparse"),
        (start.after, "dense"),
    ]
    losses, found = (
        [mean_loss(*side, text) for side in sides],
        [found_frac(*side, tasks) for side in sides],
    )
    length, context = start.config.context_tokens, CONTEXT_RATIO * start.num_selected
    for index, peer in ((0, "dense before the stage"), (2, "the same weights dense")):
        table.row(
            f"held-out loss, {num_documents} documents of {length} tokens [nats], sparse, peer {peer}",
            f"{losses[1]:.4f}",
            peer=f"{losses[index]:.4f}",
            ratio=losses[1] / losses[index],
            bar=f"<= {MAX_LOSS_RATIO}",
            holds=losses[1] <= MAX_LOSS_RATIO * losses[index],
        )
    for index, peer in ((0, "dense before the stage"), (2, "the same weights dense")):
        table.row(
            f"recall of {num_needles} needles in {context} tokens, {start.num_selected} keys [%], sparse, peer {peer}",
            f"{100 * found[1]:.1f}",
            peer=f"{100 * found[index]:.1f}",
            bar=f"at most {100 * MAX_RECALL_LOSS:.0f} points below",
            holds=num_needles >= BAR_NEEDLES and 0 < found[index] <= found[1] + MAX_RECALL_LOSS,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--stage", default="dsa")
    parser.add_argument("--documents", type=positive, default=256, help="of held-out text")
    parser.add_argument("--needles", type=positive, default=BAR_NEEDLES)
    parser.add_argument("--quick", action="store_true", help="few of everything: does it run?")
    options = parser.parse_args()
    table = Table()
    try:
        start = read_run(options.run, options.stage)
    except LongArcError as error:
        print(f"{error}\nmake quickstart makes a run")
        for figure in ("held-out loss", "recall") * 2:
            table.row(figure, "not measured", holds=False)
        table.close()
        return 1
    add_rows(
        table,
        start,
        num_documents=8 if options.quick else options.documents,
        num_needles=20 if options.quick else options.needles,
    )
    return 0 if table.close() else 1


if __name__ == "__main__":
    sys.exit(main())
