"""Any pattern of shared indexers: prefill, decode and packing agree bit for bit, and groups of layers are whole."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longarc.config.index_share import kinds_of, layers_served
from longarc.models.build import build_model
from longarc.models.layout import Layout
from model_cases import sharpened, small_glm

PATTERNS = st.text("FS", min_size=1, max_size=4).map("F".__add__)


@given(PATTERNS)
def test_every_layer_is_served_by_one_indexer(pattern):
    kinds = kinds_of(pattern)
    groups = [layers_served(kinds, layer) for layer in range(len(kinds))]
    assert all(layer in group for layer, group in enumerate(groups))
    assert sorted({group.start for group in groups}) == [
        layer for layer, kind in enumerate(kinds) if kind == "full"
    ]
    assert sum(len(group) for group in set(groups)) == len(kinds)


@settings(max_examples=12, deadline=None)
@given(
    PATTERNS,
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_packing_and_any_split_into_prefill_and_decode_agree(pattern, lengths, rng):
    config = small_glm(num_hidden_layers=len(pattern), index_topk_pattern=pattern)
    model = sharpened(build_model(config, seed=rng.randrange(100)))
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    ids = torch.randint(0, 64, (sum(lengths),), generator=generator)
    packed = model(ids, Layout.documents(lengths)).hidden

    cache = model.new_cache(len(lengths), 64)
    documents, done = ids.split(lengths), [0] * len(lengths)
    parts: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        slots = [i for i, n in enumerate(lengths) if done[i] < n]
        counts = [rng.choice([1, rng.randint(1, lengths[i] - done[i])]) for i in slots]
        new = torch.cat(
            [documents[i][done[i] : done[i] + n] for i, n in zip(slots, counts, strict=True)]
        )
        hidden = model.extend(new, slots, [done[i] for i in slots], counts, cache)
        for i, n, part in zip(slots, counts, hidden.split(counts), strict=True):
            parts[i].append(part)
            done[i] += n
    assert torch.equal(torch.cat([torch.cat(part) for part in parts]), packed)
