"""Drafts while sequences are sampled: those of the training forward, however the tokens arrive."""

import pytest
import torch

from longarc.config.model import AttentionPattern
from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.models.conversion import to_hybrid
from longarc.models.drafting import EagerDrafter, drafter_of
from longarc.models.kernels.drafts import DraftingGlmMoeDsa
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from model_cases import sharpened, small_glm

LENGTH, NUM_DEPTHS = 50, 3
needs_native = pytest.mark.skipif(native() is None, reason="the native kernels were not built")


def drafting_model(dtype=torch.float32, **changes):
    config = small_glm(num_nextn_predict_layers=1, **changes)
    return sharpened(build_model(config, seed=3)).to(dtype)


def hybrid_drafter(layers):
    glm = small_glm(num_hidden_layers=len(layers), num_nextn_predict_layers=1)
    pattern = AttentionPattern(layers=layers, window=9, chunk_tokens=8)
    return to_hybrid(sharpened(build_model(glm, seed=3)), pattern)


def text_drafts(model, ids, attention="sparse"):
    """Logits of all depths from the training forward, [depth, row, vocab]."""
    layout = Layout.documents([len(ids)])
    with torch.no_grad():
        hidden = model(ids, layout, attention=attention).hidden
        output = model.drafts(hidden, ids, layout, attention=attention)
        logits = [project_logits(rows, model.output_weight) for rows in output.hidden]
    return hidden, torch.stack(logits)


def new_cache(model, **sizes):
    return model.new_drafting_cache(**{"num_slots": 2, "max_length": 64, **sizes})


def read_all(chain, ids):
    return torch.stack([chain.read(ids[i : i + 1])[0] for i in range(len(ids))])


@pytest.mark.parametrize("attention", ["sparse", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mtp_query_position": "stay", "mtp_feeds_normed": False}],
    ids=["default", "others"],
)
def test_drafts_are_those_of_training_at_every_position(attention, dtype, changes, make_ids):
    check_drafts_are_those_of_training(
        drafting_model(dtype, **changes), attention, make_ids(LENGTH)
    )


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_a_hybrid_drafts_as_it_trains_and_has_no_indexer(attention, make_ids):
    model = hybrid_drafter("SGDF")
    assert not [name for name in model.state_dict() if "indexer" in name]
    check_drafts_are_those_of_training(model, attention, make_ids(LENGTH))


def check_drafts_are_those_of_training(model, attention, ids):
    dtype = model.output_weight.dtype
    hidden, expected = text_drafts(model, ids, attention)
    drafter = drafter_of(model, new_cache(model))
    for length in range(1, LENGTH - NUM_DEPTHS):
        if 2 <= length < 21:
            continue
        start = {1: 0, 21: 1}.get(length, length - 1)  # one token, many, and then one at a time
        drafter.take(ids[start:length], hidden[start:length], [1], [start], [length - start])
        chain = drafter.chain([1], [length], is_sparse=attention == "sparse")
        logits = read_all(chain, ids[length : length + NUM_DEPTHS])
        wanted = torch.stack([expected[d, length + d] for d in range(NUM_DEPTHS)])
        assert torch.equal(logits, wanted) or (
            dtype is torch.float64 and torch.allclose(logits, wanted, atol=1e-10)
        )


@needs_native
def test_the_native_kernels_draft_what_torch_drafts(make_ids):
    ids, logits = make_ids(40), []
    hidden, _ = text_drafts(drafting_model(), ids)
    for dtype, kind in ((torch.float32, DraftingGlmMoeDsa), (torch.float64, EagerDrafter)):
        model = drafting_model(dtype)
        drafter = drafter_of(model, new_cache(model))
        assert isinstance(drafter, kind)
        drafter.take(ids[:30], hidden[:30].to(dtype), [0], [0], [30])
        logits.append(read_all(drafter.chain([0], [30], is_sparse=True), ids[30:36]).double())
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)


def test_several_sequences_draft_side_by_side(make_ids):
    model = drafting_model()
    texts = [make_ids(30), make_ids(45)]
    states = [text_drafts(model, ids) for ids in texts]
    drafter = drafter_of(model, new_cache(model, num_slots=3))
    lengths = [12, 40]

    def take(starts, counts):
        pairs = list(zip(texts, states, starts, counts, strict=True))
        drafter.take(
            torch.cat([ids[s : s + n] for ids, _, s, n in pairs]),
            torch.cat([hidden[s : s + n] for _, (hidden, _), s, n in pairs]),
            [2, 0],
            starts,
            counts,
        )

    def check(lengths):
        chain = drafter.chain([2, 0], lengths, is_sparse=True)
        for depth in range(NUM_DEPTHS):
            logits = chain.read(
                torch.stack([ids[n + depth] for ids, n in zip(texts, lengths, strict=True)])
            )
            for row, (length, (_, expected)) in enumerate(zip(lengths, states, strict=True)):
                wanted = expected[depth, length + depth]
                torch.testing.assert_close(logits[row], wanted, rtol=0, atol=1e-5)

    take([0, 0], lengths)
    check(lengths)
    # What was drafted before leaves nothing behind, and accepted tokens come in several at a time.
    take(lengths, [4, 1])
    check([16, 41])


def test_what_sequences_have_in_common_they_draft_from_in_common_pages(make_ids):
    model = drafting_model()
    ids, other = make_ids(40), make_ids(8)
    text = torch.cat([ids[:32], other])
    hidden, _ = text_drafts(model, ids)
    hidden_of_text, expected = text_drafts(model, text)
    cache = new_cache(model, num_pages=6, page_tokens=16)
    drafter = drafter_of(model, cache)
    cache.give_pages(0, [3, 1, 4])
    drafter.take(ids, hidden, [0], [0], [40])
    cache.give_pages(1, [3, 1, 5])
    drafter.take(text[32:36], hidden_of_text[32:36], [1], [32], [4])
    logits = read_all(drafter.chain([1], [36], is_sparse=True), text[36:39])
    wanted = torch.stack([expected[d, 36 + d] for d in range(3)])
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)


def test_more_depths_than_were_trained_can_be_drafted(make_ids):
    model, deep = drafting_model(mtp_num_depths=1), drafting_model(mtp_num_depths=6)
    ids = make_ids(20)
    hidden, expected = text_drafts(deep, ids)
    drafter = drafter_of(model, new_cache(model))
    drafter.take(ids[:10], hidden[:10], [0], [0], [10])
    logits = read_all(drafter.chain([0], [10], is_sparse=True), ids[10:16])
    wanted = torch.stack([expected[d, 10 + d] for d in range(6)])
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)


def test_what_does_not_fit_is_refused(glm, make_ids):
    model, ids = drafting_model(torch.float64), make_ids(8)
    hidden, _ = text_drafts(model, ids)
    drafter = drafter_of(model, new_cache(model, num_slots=1, max_length=16))
    drafter.take(ids, hidden, [0], [0], [8])
    with pytest.raises(ContractError, match="do not fit"):
        drafter.take(ids, hidden, [0], [14], [8])
    with pytest.raises(ContractError, match="do not fit"):
        drafter.chain([0], [16], is_sparse=True)
    with pytest.raises(ContractError, match="token id 64 is outside"):
        drafter.take(torch.full_like(ids, 64), hidden, [0], [0], [8])
    with pytest.raises(ContractError, match="token id -1 is outside"):
        drafter.chain([0], [8], is_sparse=True).read(torch.tensor([-1]))
    with pytest.raises(ContractError, match="no MTP layer"):
        glm.new_drafting_cache(1, 16)
