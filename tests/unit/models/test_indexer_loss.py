import pytest
import torch

from longarc.errors import ContractError
from longarc.models import indexer, key_selection, mla
from longarc.models.build import build_model
from longarc.models.layout import Layout, Span
from model_cases import sharpened, small_glm

MODES = [("dense", "warmup"), ("sparse", "sparse")]


def is_indexer(name):
    return ".indexer." in name


@pytest.mark.parametrize(("attention_mode", "loss"), MODES)
def test_the_language_loss_never_reaches_the_indexer(indexed, make_ids, attention_mode, loss):
    layout = Layout.documents([40])
    output = indexed(make_ids(40), layout, attention=attention_mode, indexer_loss=loss)
    output.hidden.square().sum().backward()
    for name, parameter in indexed.named_parameters():
        if is_indexer(name):
            assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.parametrize(("attention_mode", "loss"), MODES)
def test_the_indexer_loss_reaches_the_whole_indexer_and_nothing_else(
    indexed, make_ids, attention_mode, loss
):
    layout = Layout.documents([40])
    output = indexed(make_ids(40), layout, attention=attention_mode, indexer_loss=loss)
    assert output.num_indexer_terms == 40 * len(indexed.config.indexed_layers)
    output.indexer_loss_sum.backward()
    for name, parameter in indexed.named_parameters():
        if is_indexer(name):
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
        else:
            assert parameter.grad is None or not parameter.grad.any(), name


def test_a_frozen_indexer_leaves_no_graph(indexed, make_ids):
    for name, parameter in indexed.named_parameters():
        parameter.requires_grad_(is_indexer(name))
    output = indexed(make_ids(40), Layout.documents([40]))
    assert not output.hidden.requires_grad


@pytest.mark.parametrize(("attention_mode", "loss"), MODES)
@pytest.mark.parametrize("block_floats", [1, 1 << 20])
def test_the_loss_is_the_divergence_written_out(
    make_ids, monkeypatch, attention_mode, loss, block_floats
):
    """One layer; every quantity recomputed for each query from the modules' own weights."""
    monkeypatch.setattr(indexer, "SCORED_FLOATS", block_floats)
    monkeypatch.setattr(key_selection, "SCORED_FLOATS", block_floats)
    monkeypatch.setattr(mla, "SCORED_FLOATS", block_floats)
    model = sharpened(build_model(small_glm(num_hidden_layers=1), seed=3)).double()
    ids, layout = make_ids(50), Layout((Span(20), Span(18, 0), Span(12, 0)))
    got = model(ids, layout, attention=attention_mode, indexer_loss=loss).indexer_loss_sum

    expected = 0.0
    for chain, first in (([0, 38], 0), ([0, 20, 38, 50], 20)):
        rows = torch.cat([torch.arange(a, b) for a, b in zip(chain[::2], chain[1::2], strict=True)])
        expected += divergence(model, ids[rows], first, select=loss == "sparse")
    assert got.item() == pytest.approx(expected, abs=1e-9)


def divergence(model, ids, first, *, select):
    layer, config = model.model.layers[0], model.config
    attn, index = layer.self_attn, layer.self_attn.indexer
    rotation = model.rotation(torch.arange(len(ids)))
    x = layer.input_layernorm(model.model.embed_tokens(ids))
    latent = attn.q_a_layernorm(attn.q_a_proj(x))
    q_nope, q_rope = attn.q_b_proj(latent).view(len(ids), 4, 16).split([12, 4], dim=-1)
    c, k_rope = attn.kv_a_proj_with_mqa(x).split([16, 4], dim=-1)
    k_nope = attn.kv_b_proj(attn.kv_a_layernorm(c)).view(len(ids), 4, 28)[..., :12]
    k_rope = rotation.apply(k_rope[:, None]).expand(-1, 4, -1)
    query = torch.cat([q_nope, rotation.apply(q_rope)], dim=-1)
    logits = torch.einsum("qnd,knd->nqk", query, torch.cat([k_nope, k_rope], dim=-1)) / 4.0
    rows = index.project(x, latent, rotation)
    scores = torch.einsum("qji,ki->qjk", rows.query, rows.key).relu()
    scores = torch.einsum("qj,qjk->qk", rows.weight, scores)
    total = 0.0
    for t in range(first, len(ids)):
        keys = list(range(t + 1))
        if select:
            keys = sorted(keys, key=lambda s: (-scores[t, s].item(), s))[: config.index_topk]
        p = logits[:, t, keys].softmax(-1).sum(0) / 4
        total += (p * (p.log() - scores[t, keys].log_softmax(-1))).sum().item()
    return total


def test_training_on_the_loss_brings_the_indexer_closer(glm, make_ids):
    ids, layout = make_ids(60), Layout.documents([60])
    optimizer = torch.optim.Adam([p for n, p in glm.named_parameters() if is_indexer(n)], lr=1e-2)
    losses = []
    for _ in range(15):
        loss = glm(ids, layout, attention="dense", indexer_loss="warmup").indexer_loss_sum
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(("attention_mode", "loss"), [("sparse", "warmup"), ("dense", "sparse")])
def test_a_loss_for_the_other_kind_of_attention_is_refused(glm, make_ids, attention_mode, loss):
    with pytest.raises(ContractError, match="does not go with"):
        glm(make_ids(5), Layout.documents([5]), attention=attention_mode, indexer_loss=loss)
