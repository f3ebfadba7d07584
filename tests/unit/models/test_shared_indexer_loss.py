"""What the indexer of several layers learns: their mean attention, written out; and nothing leaks."""

import pytest
import torch

from longarc.models import indexer, mla
from longarc.models.build import build_model
from longarc.models.layout import Layout
from model_cases import sharpened, small_glm

MODES = [("dense", "warmup"), ("sparse", "sparse")]
NUM_TOKENS = 50


def shared_model(pattern):
    config = small_glm(num_hidden_layers=len(pattern), index_topk_pattern=pattern)
    return sharpened(build_model(config, seed=3))


def attention_of(layer, x, rotation):
    """Return the probabilities before masking, as logits [heads, queries, keys], of one layer."""
    attn, n = layer.self_attn, len(x)
    latent = attn.q_a_layernorm(attn.q_a_proj(x))
    q_nope, q_rope = attn.q_b_proj(latent).view(n, 4, 16).split([12, 4], dim=-1)
    c, k_rope = attn.kv_a_proj_with_mqa(x).split([16, 4], dim=-1)
    k_nope = attn.kv_b_proj(attn.kv_a_layernorm(c)).view(n, 4, 28)[..., :12]
    k_rope = rotation.apply(k_rope[:, None]).expand(-1, 4, -1)
    query = torch.cat([q_nope, rotation.apply(q_rope)], dim=-1)
    key = torch.cat([k_nope, k_rope], dim=-1)
    return torch.einsum("qnd,knd->nqk", query, key) / 4.0, latent


def expected_loss(model, inputs, *, select):
    """Return the sum over queries of the mean over layers of KL(p of the layer || q of the first)."""
    rotation = model.rotation(torch.arange(NUM_TOKENS))
    logits, latents = zip(
        *(attention_of(*pair, rotation) for pair in zip(model.model.layers, inputs, strict=True)),
        strict=True,
    )
    rows = model.model.layers[0].self_attn.indexer.project(inputs[0], latents[0], rotation)
    scores = torch.einsum("qji,ki->qjk", rows.query, rows.key).relu()
    scores = torch.einsum("qj,qjk->qk", rows.weight, scores)
    total = torch.zeros((), dtype=torch.float64)
    for t in range(NUM_TOKENS):
        keys = list(range(t + 1))
        if select:
            keys = sorted(keys, key=lambda s: (-scores[t, s].item(), s))[: model.config.index_topk]
        log_q = scores[t, keys].log_softmax(-1)
        for layer in logits:
            p = layer[:, t, keys].softmax(-1).sum(0).detach() / 4
            total = total + (p * (p.log() - log_q)).sum() / len(logits)
    return total


@pytest.mark.parametrize(("attention", "loss"), MODES)
@pytest.mark.parametrize("block_floats", [1, 1 << 20])
def test_value_and_gradient_are_the_mean_over_the_layers_written_out(
    make_ids, monkeypatch, attention, loss, block_floats
):
    monkeypatch.setattr(indexer, "SCORED_FLOATS", block_floats)
    monkeypatch.setattr(mla, "SCORED_FLOATS", block_floats)
    model = shared_model("FSS").double()
    inputs = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *call: inputs.append(call[-1].detach()))
    output = model(
        make_ids(NUM_TOKENS), Layout.documents([NUM_TOKENS]), attention=attention, indexer_loss=loss
    )
    inputs = [x[:NUM_TOKENS] for x in inputs]
    expected = expected_loss(model, inputs, select=loss == "sparse")
    assert output.num_indexer_terms == NUM_TOKENS
    assert output.indexer_loss_sum.item() == pytest.approx(expected.item(), abs=1e-9)

    parameters = list(model.model.layers[0].self_attn.indexer.parameters())
    for got, want in zip(
        torch.autograd.grad(output.indexer_loss_sum, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("attention", "loss"), MODES)
def test_a_stride_and_several_groups_are_counted(make_ids, attention, loss):
    model = shared_model("FSFSS")
    output = model(
        make_ids(40),
        Layout.documents([40]),
        attention=attention,
        indexer_loss=loss,
        indexer_stride=3,
    )
    assert output.num_indexer_terms == (14 if loss == "sparse" else 40) * 2


def test_an_indexer_learns_from_the_layers_that_use_it(make_ids):
    """Attention of a shared layer changes the gradient of the indexer before it, and of no other."""
    ids, layout = make_ids(60), Layout.documents([60])
    grads = []
    for factor in (1.0, 3.0):
        model = shared_model("FSF")
        with torch.no_grad():  # the last layers' inputs stay as they are
            model.model.layers[1].self_attn.o_proj.weight.zero_()
            model.model.layers[1].self_attn.q_b_proj.weight.mul_(factor)
        model(ids, layout, indexer_loss="sparse").indexer_loss_sum.backward()
        grads.append([model.model.layers[i].self_attn.indexer.wk.weight.grad for i in (0, 2)])
    (first, last), (other_first, other_last) = grads
    assert not torch.equal(first, other_first)
    assert torch.equal(last, other_last)
