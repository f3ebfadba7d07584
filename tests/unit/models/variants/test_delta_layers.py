"""Layers of the delta rule against the published formulas, written down token by token in float64."""

import math

import pytest
import torch
from hybrid_cases import hybrid

from longarc.models.decoder_base import Pass
from longarc.models.layout import Layout
from longarc.models.plan import AttentionPlan

N, TAPS = 13, 4


def turned(x, position, base, *, interleaved):
    """Rotate one head as complex numbers."""
    width = len(x)
    pairs = x.view(-1, 2) if interleaved else x.view(2, -1).T
    # The frequencies are those of the model, which takes them in fp32.
    angle = float(position) * (
        1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    )
    there = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(width // 2, dtype=torch.float64), angle.double()
    )
    out = torch.view_as_real(there)
    return out.flatten() if interleaved else out.T.flatten()


def rms(x, weight, eps):
    return weight * x / math.sqrt(float((x * x).mean()) + eps)


def llama_heads(layer, config, x, position, *, rotates):
    """Return a token's queries, keys and values by query head."""
    width = config.hidden_size // config.num_attention_heads
    query, key, value = (
        (p.weight @ x).view(-1, width) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if rotates:
        turn = lambda row: turned(row, position, config.rope_theta, interleaved=False)  # noqa: E731
        query, key = (torch.stack([turn(row) for row in t]) for t in (query, key))
    group = config.num_attention_heads // config.num_key_value_heads
    of_head = [head // group for head in range(config.num_attention_heads)]
    return query, key[of_head], value[of_head]


def glm_heads(layer, config, x, position, *, rotates):
    nope, eps = config.qk_nope_head_dim, config.rms_norm_eps
    heads = config.num_attention_heads
    latent = rms(layer.q_a_proj.weight @ x, layer.q_a_layernorm.weight, eps)
    query = (layer.q_b_proj.weight @ latent).view(heads, -1)
    row = layer.kv_a_proj_with_mqa.weight @ x
    c = rms(row[: config.kv_lora_rank], layer.kv_a_layernorm.weight, eps)
    expanded = (layer.kv_b_proj.weight @ c).view(heads, -1)
    shared = row[config.kv_lora_rank :]
    if rotates:
        turn = lambda row: turned(row, position, config.rope_theta, interleaved=True)  # noqa: E731
        shared = turn(shared)
        query = torch.stack([torch.cat([q[:nope], turn(q[nope:])]) for q in query])
    key = torch.stack([torch.cat([k[:nope], shared]) for k in expanded])
    return query, key, expanded[:, nope:]


def unit(x):
    return x / torch.sqrt((x * x).sum() + 1e-6)


def silu(x):
    return x / (1 + torch.exp(-x))


def gated_inputs(delta, channels, xs):
    """Return convolved queries, keys and values, decays and betas of all tokens."""
    convolved = []
    for token in range(len(xs)):
        total = torch.zeros_like(channels[0])
        for tap in range(TAPS):
            if token - (TAPS - 1 - tap) >= 0:
                total += delta.conv_weight[:, tap] * channels[token - (TAPS - 1 - tap)]
        convolved.append(silu(total))
    decays = [
        torch.exp(
            -torch.exp(delta.a_log)
            * torch.log1p(torch.exp(delta.a_proj.weight @ x + delta.dt_bias))
        )
        for x in xs
    ]
    return convolved, decays, [1 / (1 + torch.exp(-(delta.b_proj.weight @ x))) for x in xs]


def expected(layer, config, xs, heads_of):
    pattern, delta = config.pattern, layer.delta
    rows = [
        heads_of(layer, config, x, position, rotates=pattern.rotates_delta)
        for position, x in enumerate(xs)
    ]
    is_gated = pattern.layers == "G"
    heads, key_width, value_width = (
        config.num_attention_heads,
        rows[0][1].shape[1],
        rows[0][2].shape[1],
    )
    if is_gated:
        channels = [torch.cat([part.flatten() for part in row]) for row in rows]
        convolved, decays, betas = gated_inputs(delta, channels, xs)
        split = [heads * key_width, heads * key_width, heads * value_width]
        rows = [tuple(p.view(heads, -1) for p in row.split(split)) for row in convolved]
    else:
        decays = [torch.full((heads,), pattern.simple_decay, dtype=torch.float64)] * len(xs)
        betas = [torch.full((heads,), pattern.simple_beta, dtype=torch.float64)] * len(xs)
    outputs = []
    state = torch.zeros(heads, value_width, key_width, dtype=torch.float64)
    for token, (query, key, value) in enumerate(rows):
        read = []
        for h in range(heads):
            k, q, a, b = unit(key[h]), unit(query[h]), decays[token][h], betas[token][h]
            forget = torch.eye(key_width, dtype=torch.float64) - b * torch.outer(k, k)
            state[h] = a * state[h] @ forget + b * torch.outer(value[h], k)
            out = state[h] @ q
            if is_gated:
                gate = silu((delta.g_proj.weight @ xs[token]).view(heads, -1)[h])
                out = rms(out, delta.o_norm.weight, config.rms_norm_eps) * gate
            read.append(out)
        outputs.append(layer.o_proj.weight @ torch.cat(read))
    return torch.stack(outputs)


@pytest.mark.parametrize("rotates", [False, True], ids=["as they are", "rotated"])
@pytest.mark.parametrize("letter", ["G", "D"])
@torch.no_grad()
def test_a_layer_of_the_delta_rule_is_its_formula(base, letter, rotates):
    constants = {"simple_decay": 0.9, "simple_beta": 0.7}
    model = hybrid(base, letter, rotates_delta=rotates, chunk_tokens=4, **constants).double()
    layer = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(5)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
    x = torch.randn(N, model.config.hidden_size, generator=generator, dtype=torch.float64)
    step = Pass(
        rotation=model.rotation(torch.arange(N)),
        num_tokens=N,
        plan=AttentionPlan.of_layout(Layout.documents([N]), x.device),
        attention="dense",
        backend="cpu",
    )
    heads_of = glm_heads if base == "glm" else llama_heads
    want = expected(layer, model.config, list(x), heads_of)
    assert want.std() > 0.1
    # Cosines are rounded to fp32 in the model.
    tolerance = 1e-5 if rotates else 1e-11
    torch.testing.assert_close(
        layer(x, step), want, rtol=0, atol=tolerance * float(want.abs().max())
    )
