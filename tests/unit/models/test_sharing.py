import pytest
import torch

from longarc.errors import ContractError
from longarc.models.layout import Layout, Span


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_a_shared_prompt_gives_what_separate_prompts_give(decoder, make_ids, attention):
    decoder.double()
    prompt, answers, other = make_ids(20), [make_ids(15), make_ids(9)], make_ids(17)
    follow_up = make_ids(6)
    pieces = [prompt, answers[0], other, answers[1], follow_up]
    shared = Layout((Span(20), Span(15, 0), Span(17), Span(9, 0), Span(6, 1)))
    weights = torch.randn(67, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = weights.split([len(p) for p in pieces])

    together = decoder(torch.cat(pieces), shared, attention=attention).hidden
    (together * weights).sum().backward()
    shared_gradients = {name: grad.clone() for name, grad in gradients(decoder).items()}

    decoder.zero_grad()
    first = decoder(
        torch.cat([prompt, answers[0], follow_up]), Layout.documents([41]), attention=attention
    ).hidden
    second = decoder(
        torch.cat([prompt, answers[1], other]), Layout.documents([29, 17]), attention=attention
    ).hidden
    apart = torch.cat([first[:35], second[29:], second[20:29], first[35:]])
    (apart * torch.cat([weight[0], weight[1], weight[2], weight[3], weight[4]])).sum().backward()

    torch.testing.assert_close(together, apart, rtol=0, atol=1e-11)
    assert shared_gradients.keys() == gradients(decoder).keys()
    for name, grad in gradients(decoder).items():
        torch.testing.assert_close(shared_gradients[name], grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_document_does_not_see_its_neighbours(decoder, make_ids):
    document = make_ids(40)
    alone = decoder(document, Layout.documents([40])).hidden
    packed = decoder(
        torch.cat([make_ids(33), document, make_ids(7)]), Layout.documents([33, 40, 7])
    )
    torch.testing.assert_close(packed.hidden[33:73], alone, rtol=0, atol=1e-5)


def test_a_sparse_document_is_bitwise_the_same_in_any_company(indexed, make_ids):
    document = make_ids(40)
    alone = indexed(document, Layout.documents([40])).hidden
    packed = indexed(torch.cat([make_ids(33), document]), Layout.documents([33, 40])).hidden
    assert torch.equal(packed[33:], alone)


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_a_broken_document_does_not_touch_its_neighbours(decoder, make_ids, attention):
    """NaN times a probability of zero is NaN, so this fails where a mask is a product."""
    decoder.model.embed_tokens.weight.data[63] = float("nan")
    document = make_ids(40).clamp_max(62)
    ids = torch.cat([torch.full((20,), 63), document, torch.full((9,), 63)])
    with torch.no_grad():  # in training, where the loss would be lost anyway, it is an error
        alone = decoder(document, Layout.documents([40]), attention=attention).hidden
        packed = decoder(ids, Layout.documents([20, 40, 9]), attention=attention).hidden
    assert alone.isfinite().all()
    torch.testing.assert_close(packed[20:60], alone, rtol=0, atol=1e-5)
    assert packed[:20].isnan().all()


def test_no_token_sees_the_future(decoder, make_ids):
    ids = make_ids(50)
    changed = ids.clone()
    changed[30:] = (changed[30:] + 1) % 64
    before = decoder(ids, Layout.documents([50])).hidden
    after = decoder(changed, Layout.documents([50])).hidden
    torch.testing.assert_close(before[:30], after[:30], rtol=0, atol=1e-5)
    assert not torch.allclose(before[30:], after[30:], atol=1e-2)


def test_sparse_attention_over_few_tokens_is_dense_attention(glm, make_ids):
    ids = make_ids(12)  # index_topk
    sparse = glm(ids, Layout.documents([12]), attention="sparse").hidden
    dense = glm(ids, Layout.documents([12]), attention="dense").hidden
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-5)


def test_sparse_attention_over_many_tokens_is_not(glm, make_ids):
    ids = make_ids(60)
    sparse = glm(ids, Layout.documents([60]), attention="sparse").hidden
    dense = glm(ids, Layout.documents([60]), attention="dense").hidden
    assert (sparse - dense)[12:].abs().amax() > 0.05


def test_ids_that_do_not_fit_the_layout_are_refused(decoder, make_ids):
    with pytest.raises(ContractError, match="5 token ids do not fit a layout of 6"):
        decoder(make_ids(5), Layout.documents([6]))


def test_a_sequence_beyond_the_context_is_refused(decoder, make_ids):
    with pytest.raises(ContractError, match="max_position_embeddings=256"):
        decoder(make_ids(257), Layout((Span(200), Span(57, 0))))
