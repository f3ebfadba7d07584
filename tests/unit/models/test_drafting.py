"""Drafts while sequences are sampled: those of the training forward, however the states arrive."""

import pytest
import torch

from longarc.config.model import AttentionPattern
from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.models.conversion import to_hybrid
from longarc.models.drafting import draft, new_draft_cache
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from model_cases import sharpened, small_glm

LENGTH, NUM_DEPTHS = 50, 3


def drafter(dtype=torch.float32, **changes):
    config = small_glm(num_nextn_predict_layers=1, **changes)
    return sharpened(build_model(config, seed=3)).to(dtype)


def hybrid_drafter(layers):
    glm = small_glm(num_hidden_layers=len(layers), num_nextn_predict_layers=1)
    pattern = AttentionPattern(layers=layers, window=9, chunk_tokens=8)
    return to_hybrid(sharpened(build_model(glm, seed=3)), pattern)


def reads(*tokens_by_step):
    """Let the drafts go on from the tokens of the text."""
    steps = iter(tokens_by_step)
    return lambda logits: torch.tensor(next(steps))


def text_drafts(model, ids, attention):
    """Logits of all depths from the training forward, [depth, row, vocab]."""
    layout = Layout.documents([len(ids)])
    with torch.no_grad():
        hidden = model(ids, layout, attention=attention).hidden
        output = model.drafts(hidden, ids, layout, attention=attention)
        logits = [project_logits(rows, model.output_weight) for rows in output.hidden]
    return hidden, torch.stack(logits)


@pytest.mark.parametrize("attention", ["sparse", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mtp_query_position": "stay", "mtp_feeds_normed": False}],
    ids=["default", "others"],
)
def test_drafts_are_those_of_training_at_every_position(attention, dtype, changes, make_ids):
    check_drafts_are_those_of_training(drafter(dtype, **changes), attention, make_ids(LENGTH))


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_a_hybrid_drafts_as_it_trains_and_has_no_indexer(attention, make_ids):
    model = hybrid_drafter("SGDF")
    assert not [name for name in model.state_dict() if "indexer" in name]
    check_drafts_are_those_of_training(model, attention, make_ids(LENGTH))


def check_drafts_are_those_of_training(model, attention, ids):
    dtype = model.output_weight.dtype
    hidden, expected = text_drafts(model, ids, attention)
    cache = new_draft_cache(model, num_slots=2, max_length=64)
    for i in range(20, LENGTH - NUM_DEPTHS - 1):
        start = 0 if i == 20 else i  # many states, as of a prompt, and then one at a time
        drafted = draft(
            model,
            hidden[start : i + 1],
            ids[start + 1 : i + 2],
            [1],
            [start],
            [i + 1 - start],
            cache,
            num_steps=NUM_DEPTHS,
            choose=reads(*[[int(ids[i + 1 + d])] for d in range(1, NUM_DEPTHS + 1)]),
            attention=attention,
        )
        wanted = torch.stack([expected[d - 1, i + d] for d in range(1, NUM_DEPTHS + 1)])
        assert torch.equal(drafted.logits[0], wanted) or (
            dtype is torch.float64 and torch.allclose(drafted.logits[0], wanted, atol=1e-10)
        )
        assert drafted.token_ids[0].tolist() == ids[i + 2 : i + 2 + NUM_DEPTHS].tolist()


def test_several_sequences_draft_side_by_side(make_ids):
    model = drafter()
    texts = [make_ids(30), make_ids(45)]
    states = [text_drafts(model, ids, "sparse") for ids in texts]
    cache = new_draft_cache(model, num_slots=3, max_length=64)
    ends = [12, 40]

    def step(counts, starts, steps):
        pairs = list(zip(texts, states, starts, counts, strict=True))
        return draft(
            model,
            torch.cat([hidden[s : s + n] for _, (hidden, _), s, n in pairs]),
            torch.cat([ids[s + 1 : s + n + 1] for ids, _, s, n in pairs]),
            [2, 0],
            starts,
            counts,
            cache,
            num_steps=NUM_DEPTHS,
            choose=reads(*steps),
        )

    def text_after(ends):
        return [
            [int(ids[end + d]) for ids, end in zip(texts, ends, strict=True)]
            for d in range(1, NUM_DEPTHS + 1)
        ]

    step(ends, [0, 0], text_after(ends))
    # What was drafted before leaves nothing behind, and accepted tokens come in several at a time.
    later = [ends[0] + 1, ends[1] + 1]
    drafted = step([1, 1], ends, text_after(later))
    for index, end in enumerate(later):
        expected = torch.stack([states[index][1][d - 1, end + d - 1] for d in (1, 2, 3)])
        torch.testing.assert_close(drafted.logits[index], expected, rtol=0, atol=1e-5)


def test_more_steps_than_were_trained_can_be_drafted(make_ids):
    model, deep = drafter(mtp_num_depths=1), drafter(mtp_num_depths=6)
    ids = make_ids(20)
    hidden, expected = text_drafts(deep, ids, "sparse")
    drafted = draft(
        model,
        hidden[:10],
        ids[1:11],
        [0],
        [0],
        [10],
        new_draft_cache(model, num_slots=1, max_length=32),
        num_steps=6,
        choose=reads(*[[int(ids[10 + d])] for d in range(1, 7)]),
    )
    wanted = torch.stack([expected[d - 1, 9 + d] for d in range(1, 7)])
    torch.testing.assert_close(drafted.logits[0], wanted, rtol=0, atol=1e-5)


def test_drafts_go_on_from_what_was_chosen(make_ids):
    model = drafter()
    ids = make_ids(20)
    hidden, _ = text_drafts(model, ids, "sparse")
    greedy = draft(
        model,
        hidden[:10],
        ids[1:11],
        [0],
        [0],
        [10],
        new_draft_cache(model, num_slots=1, max_length=32),
        num_steps=3,
        choose=lambda logits: logits.argmax(dim=1),
    )
    assert greedy.token_ids[0].tolist() == greedy.logits[0].argmax(dim=1).tolist()
    text = torch.cat([ids[:11], greedy.token_ids[0, :2], ids[:1]])
    _, expected = text_drafts(model, text, "sparse")
    torch.testing.assert_close(greedy.logits[0, 2], expected[2, 12], rtol=0, atol=1e-5)


def test_numbers_that_disagree_are_refused(glm, make_ids):
    model, ids = drafter(), make_ids(8)
    hidden, _ = text_drafts(model, ids, "sparse")
    cache = new_draft_cache(model, num_slots=1, max_length=16)

    def call(
        model=model,
        *,
        start=0,
        counts=(5,),
        num_steps=2,
        ids=ids,
        choose=lambda logits: logits.argmax(dim=1),
    ):
        num_new = sum(counts) if sum(counts) != 4 else 5
        draft(
            model,
            hidden[:num_new],
            ids[1 : num_new + 1],
            [0][: len(counts)],
            [start][: len(counts)],
            counts,
            cache,
            num_steps=num_steps,
            choose=choose,
        )

    with pytest.raises(ContractError, match="counts that sum to 4"):
        call(counts=(4,))
    with pytest.raises(ContractError, match="num_steps=0"):
        call(num_steps=0)
    with pytest.raises(ContractError, match="do not fit"):
        call(start=14)
    with pytest.raises(ContractError, match="no sequence to draft for"):
        call(counts=())
    with pytest.raises(ContractError, match="token id 64 is outside"):
        call(ids=torch.full_like(ids, 64))
    with pytest.raises(ContractError, match="token id -1 is outside"):
        call(choose=lambda logits: logits.argmax(dim=1) * 0 - 1)
    with pytest.raises(ContractError, match=r"ids of shape \[1, 64\] for logits of 1 sequences"):
        call(choose=lambda logits: logits.argsort(dim=1))
    with pytest.raises(ContractError, match="no MTP layer"):
        call(glm)
