"""Multi-token prediction spelt out: one document, one draft at a time, keys and values per head."""

import torch
import torch.nn.functional as F

from longarc.models.layers import RMSNorm


def normed(x, norm: RMSNorm):
    return x * torch.rsqrt(x.square().mean() + norm.eps) * norm.weight


def rotated(model, x, position):
    """Turn neighbouring pairs; ``x`` is [heads, width]. Angles are rounded to fp32, as in the model."""
    width = x.shape[-1]
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    angle = torch.tensor(position, dtype=torch.float32) * (1.0 / model.config.rope_theta**exponent)
    cos, sin = (f(angle.double()).float().to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x[:, 0::2], x[:, 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(1)


class Reference:
    """All drafts of one document."""

    def __init__(self, model, hidden, ids, *, attention):
        self.model, self.config = model, model.config
        self.mtp, self.attn = model.mtp, model.mtp.self_attn
        self.latents, self.index_keys, self.selections = [], [], []
        state = list(hidden)
        self.outputs = []
        for depth in range(1, self.config.mtp_num_depths + 1):
            outputs, fed = [], []
            for i in range(len(ids) - depth):
                output, handed_on = self.draft(depth, i, int(ids[i + depth]), state[i], attention)
                outputs.append(output)
                fed.append(handed_on)
            self.outputs.append(outputs)
            state = fed

    def draft(self, depth, i, token, before, attention):
        mtp, config = self.mtp, self.config
        embedded = self.model.model.embed_tokens.weight[token]
        if depth == 1 and i == 0:
            embedded = torch.zeros_like(embedded)
        joined = torch.cat([normed(embedded, mtp.enorm), normed(before, mtp.hnorm)])
        z = mtp.eh_proj.weight @ joined
        position = i + (depth - 1 if config.mtp_query_position == "advance" else 0)
        hidden = z + self.attend(depth, i, normed(z, mtp.input_layernorm), position, attention)
        hidden = hidden + self.mixture(normed(hidden, mtp.post_attention_layernorm))
        output = normed(hidden, mtp.shared_head.norm)
        return output, output if config.mtp_feeds_normed else hidden

    def attend(self, depth, i, x, position, attention):
        config, attn = self.config, self.attn
        heads, nope, rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        q_latent = normed(attn.q_a_proj.weight @ x, attn.q_a_layernorm)
        query = (attn.q_b_proj.weight @ q_latent).view(heads, nope + rope)
        q_nope, q_rope = query[:, :nope], rotated(self.model, query[:, nope:], position)
        if depth == 1:
            both = attn.kv_a_proj_with_mqa.weight @ x
            c = normed(both[: config.kv_lora_rank], attn.kv_a_layernorm)
            self.latents.append((c, rotated(self.model, both[config.kv_lora_rank :][None], i)[0]))
            self.selections.append(self.select(i, x, q_latent))
        chosen = self.selections[i] if attention == "sparse" else range(i + 1)
        up = attn.kv_b_proj.weight.view(heads, nope + config.v_head_dim, config.kv_lora_rank)
        mixed = []
        for head in range(heads):
            keys = [
                (q_nope[head] @ (up[head, :nope] @ c) + q_rope[head] @ k)
                for c, k in (self.latents[j] for j in chosen)
            ]
            weights = (torch.stack(keys) / (nope + rope) ** 0.5).softmax(dim=0)
            values = torch.stack([up[head, nope:] @ self.latents[j][0] for j in chosen])
            mixed.append(weights @ values)
        return attn.o_proj.weight @ torch.cat(mixed)

    def select(self, i, x, q_latent):
        config, indexer = self.config, self.attn.indexer
        heads, width, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim

        def turned(rows):
            return torch.cat([rotated(self.model, rows[:, :rope], i), rows[:, rope:]], dim=1)

        key = F.layer_norm(
            indexer.wk.weight @ x, (width,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6
        )
        self.index_keys.append(turned(key[None])[0])
        query = turned((indexer.wq_b.weight @ q_latent).view(heads, width))
        weight = indexer.weights_proj.weight @ x
        scores = [float((weight * (query @ k).relu()).sum()) for k in self.index_keys]
        best = sorted(range(i + 1), key=lambda j: (-scores[j], j))[: config.index_topk]
        return sorted(best)

    def mixture(self, x):
        config, mlp = self.config, self.mtp.mlp
        score = (mlp.gate.weight @ x).sigmoid()
        order = (score + mlp.gate.e_score_correction_bias.to(score.dtype)).argsort(descending=True)
        chosen = order[: config.num_experts_per_tok]
        weights = score[chosen] / (score[chosen].sum() + 1e-20) * config.routed_scaling_factor
        width = config.moe_intermediate_size
        total = 0
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gate_up = mlp.experts.gate_up_proj[expert]
            inner = F.silu(gate_up[:width] @ x) * (gate_up[width:] @ x)
            total = total + weight * (mlp.experts.down_proj[expert] @ inner)
        shared = mlp.shared_experts
        inner = F.silu(shared.gate_proj.weight @ x) * (shared.up_proj.weight @ x)
        return total + shared.down_proj.weight @ inner
