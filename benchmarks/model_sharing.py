"""What sharing indexers saves (IndexShare): ``longarc-nano`` with one indexer for its four layers, beside its four.

Decode steps behind a long context, whose keys the indexer scores one by one; the cache of a token; a training
step with the indexer's loss, of which there is one for each indexer. What sharing costs in loss depends on
the weights: ``longarc models share RUN --stage STAGE`` measures it.
"""

import time
from collections.abc import Callable

import torch
from common import Table

from longarc.config.index_share import kinds_of
from longarc.config.model import GlmMoeDsaConfig
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.index_share import with_shared_indexers
from longarc.models.layout import Layout

CONTEXT = 3072
BATCH = 16
NUM_STEPS = 8
TRAINED_TOKENS = 2048


def sharing_rows(table: Table, best_s: Callable[..., list[float]], repeats: int) -> None:
    """Measure one indexer against four."""
    full = build_model(GlmMoeDsaConfig(), seed=0)
    shared = with_shared_indexers(full, kinds_of("FSSS"))
    sides = [_Decoding(model) for model in (shared, full)]
    taken = best_s(repeats, *(side.seconds for side in sides))
    tokens = BATCH * NUM_STEPS
    table.row(
        f"decoding behind {CONTEXT} tokens, nano FSSS [tokens/s], peer FFFF",
        f"{tokens / taken[0]:,.0f}",
        peer=f"{tokens / taken[1]:,.0f}",
        ratio=taken[1] / taken[0],
    )
    widths = [side.bytes_per_token for side in sides]
    table.row(
        "cache, nano FSSS [bytes a token], peer FFFF",
        f"{widths[0]:,.0f}",
        peer=f"{widths[1]:,.0f}",
        ratio=widths[0] / widths[1],
    )
    taken = best_s(repeats, *(_training(model) for model in (shared, full)))
    table.row(
        f"sparse training step of {TRAINED_TOKENS} tokens with the indexer's loss, nano FSSS [tokens/s], peer FFFF",
        f"{TRAINED_TOKENS / taken[0]:,.0f}",
        peer=f"{TRAINED_TOKENS / taken[1]:,.0f}",
        ratio=taken[1] / taken[0],
    )


class _Decoding:
    """Sequences in a cache, which go on from the same place in every turn."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._slots = list(range(BATCH))
        length = CONTEXT + NUM_STEPS
        self._cache = model.new_cache(BATCH, length)
        self.bytes_per_token = self._cache.num_bytes / (BATCH * length)
        ids = torch.randint(0, 2048, (CONTEXT,), generator=torch.Generator().manual_seed(1))
        model.extend(ids, [0], [0], [CONTEXT], self._cache)
        for slot in self._slots[1:]:
            self._cache.copy_prefix(0, slot, CONTEXT)

    def seconds(self) -> float:
        started = time.perf_counter()
        for step in range(NUM_STEPS):
            ids = torch.arange(BATCH) + step
            starts = [CONTEXT + step] * BATCH
            self._model.extend(ids, self._slots, starts, [1] * BATCH, self._cache)
        return time.perf_counter() - started


def _training(model: Decoder) -> Callable[[], float]:
    ids = torch.randint(0, 2048, (TRAINED_TOKENS,), generator=torch.Generator().manual_seed(2))
    layout = Layout.documents([TRAINED_TOKENS])

    def seconds() -> float:
        model.zero_grad()
        started = time.perf_counter()
        output = model(ids, layout, indexer_loss="sparse")
        (output.hidden.sum() + output.indexer_loss_sum).backward()
        return time.perf_counter() - started

    return seconds
