"""ChatGLM2 and 3 from their description, one token row at a time where that is clearer; only to compare with.

Names and shapes of the parameters are those of the published checkpoints.
"""

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class SelfAttention(nn.Module):
    def __init__(self, config, base, stretch):
        super().__init__()
        self.heads, self.groups = config["num_attention_heads"], config["multi_query_group_num"]
        self.width, self.base, self.stretch = config["kv_channels"], base, stretch
        rows = (self.heads + 2 * self.groups) * self.width
        self.query_key_value = nn.Linear(config["hidden_size"], rows, bias=config["add_qkv_bias"])
        self.dense = nn.Linear(self.heads * self.width, config["hidden_size"], bias=False)

    def rotated(self, x):
        """Turn pair (2i, 2i + 1) of the first half of each head by position * base^(-2i / (width / 2))."""
        half, turned = self.width // 2, x.clone()
        for position in range(len(x)):
            for i in range(half // 2):
                angle = torch.tensor(position / self.stretch * self.base ** (-2 * i / half))
                even, odd = x[position, :, 2 * i], x[position, :, 2 * i + 1]
                turned[position, :, 2 * i] = even * angle.cos() - odd * angle.sin()
                turned[position, :, 2 * i + 1] = odd * angle.cos() + even * angle.sin()
        return turned

    def forward(self, x):
        n, g, d = self.heads, self.groups, self.width
        mixed = self.query_key_value(x)
        query = self.rotated(mixed[:, : n * d].view(-1, n, d))
        key = self.rotated(mixed[:, n * d : (n + g) * d].view(-1, g, d))
        value = mixed[:, (n + g) * d :].view(-1, g, d)
        outputs = []
        for head in range(n):
            group = head // (n // g)
            scores = query[:, head] @ key[:, group].T / d**0.5
            future = torch.ones_like(scores).triu(1).bool()
            outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ value[:, group])
        return self.dense(torch.cat(outputs, dim=-1))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, self.inner = config["hidden_size"], config["ffn_hidden_size"]
        self.dense_h_to_4h = nn.Linear(hidden, 2 * self.inner, bias=False)
        self.dense_4h_to_h = nn.Linear(self.inner, hidden, bias=False)

    def forward(self, x):
        both = self.dense_h_to_4h(x)
        gate, other = both[:, : self.inner], both[:, self.inner :]
        return self.dense_4h_to_h(gate * gate.sigmoid() * other)


class Layer(nn.Module):
    def __init__(self, config, base, stretch):
        super().__init__()
        eps = config["layernorm_epsilon"]
        self.input_layernorm = Norm(config["hidden_size"], eps)
        self.self_attention = SelfAttention(config, base, stretch)
        self.post_attention_layernorm = Norm(config["hidden_size"], eps)
        self.mlp = FeedForward(config)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ChatGlm(nn.Module):
    """``base`` of the frequencies; positions are divided by ``stretch``."""

    def __init__(self, config, *, base=10_000.0, stretch=1.0):
        super().__init__()
        vocab, hidden = config["padded_vocab_size"], config["hidden_size"]
        layers = [Layer(config, base, stretch) for _ in range(config["num_layers"])]
        encoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(layers),
                "final_layernorm": Norm(hidden, config["layernorm_epsilon"]),
            }
        )
        self.transformer = nn.ModuleDict(
            {
                "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(vocab, hidden)}),
                "encoder": encoder,
                "output_layer": nn.Linear(hidden, vocab, bias=False),
            }
        )

    @torch.no_grad()
    def forward(self, token_ids):
        x = self.transformer["embedding"]["word_embeddings"](token_ids)
        for layer in self.transformer["encoder"]["layers"]:
            x = layer(x)
        return self.transformer["output_layer"](self.transformer["encoder"]["final_layernorm"](x))
