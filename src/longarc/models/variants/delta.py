"""Linear attention by the delta rule, on the queries, keys and values of a layer that attended.

::

    GDN        q, k, v = silu(convolution of 4 tokens); decay and beta from the hidden state;
               output normalised by head and gated
    SimpleGDN  q, k, v as they are; decay and beta constant: no new parameter

Both read with queries and keys of length 1. Source: GLM-5, arXiv:2602.15763, section 2.1.2; Gated DeltaNet,
arXiv:2412.06464. Shape letters: T padded rows, N tokens, n heads, k key width, v value width.
"""

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longarc.algos.delta_rule import ChunkParts, chunk_parts, chunk_step, delta_rule_step
from longarc.config.model import AttentionPattern
from longarc.models.decoder_base import Pass
from longarc.models.layers import Linear, RMSNorm
from longarc.models.variants.chunks import ChunkForest
from longarc.models.variants.convolution import cached_taps, causal_convolution, packed_taps
from longarc.models.variants.memory import HybridCache, MemoryShape

NUM_TAPS = 4
"""Tokens that the convolution of GDN reads, the token itself included."""


class DeltaAttention(nn.Module):
    """What takes the place of attention between a layer's projections and its output projection."""

    memory_shape: MemoryShape

    def __init__(self, pattern: AttentionPattern, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._chunk_tokens = pattern.chunk_tokens

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "T hidden"],
        query_Nnk: Float[Tensor, "N n k"],
        key_Nnk: Float[Tensor, "N n k"],
        value_Nnv: Float[Tensor, "N n v"],
        step: Pass,
    ) -> Float[Tensor, "N n v"]:
        """Return what each token reads from the memory of its sequence; ``x`` is the layer's input."""

    def _attend(
        self,
        query_Nnk: Tensor,
        key_Nnk: Tensor,
        value_Nnv: Tensor,
        log_decay_Nn: Tensor,
        beta_Nn: Tensor,
        step: Pass,
    ) -> Tensor:
        """Run the delta rule over the sequences of the pass, in fp32 or better."""
        query_Nnk, key_Nnk = _unit_length(query_Nnk), _unit_length(key_Nnk)
        inputs = (query_Nnk, key_Nnk, _precise(value_Nnv), log_decay_Nn, beta_Nn)
        if step.cache is None:
            forest = ChunkForest.of_runs(
                step.plan.runs,
                num_tokens=step.num_tokens,
                chunk_tokens=self._chunk_tokens,
                are_continued=False,
            )
            output, _ = _scan(forest, inputs, None)
        else:
            assert isinstance(step.cache, HybridCache)
            output = self._extend(inputs, step, step.cache)
        return output.to(value_Nnv.dtype)

    def _extend(self, inputs: tuple[Tensor, ...], step: Pass, cache: HybridCache) -> Tensor:
        """Continue cached sequences: several new tokens by chunks, a single one by the recurrence."""
        memory_Snkv = cache.memory(self._layer)
        sequences = cache.sequences(step.plan)
        output_Nnv = torch.zeros_like(inputs[2])
        if step.plan.runs:
            forest = ChunkForest.of_runs(
                step.plan.runs,
                num_tokens=step.num_tokens,
                chunk_tokens=self._chunk_tokens,
                are_continued=True,
            )
            slots = torch.tensor([s.slot for s in sequences[: len(step.plan.runs)]])
            read, after = _scan(forest, inputs, memory_Snkv[slots[list(forest.root_runs)]])
            output_Nnv += read
            memory_Snkv[slots] = torch.cat(after)[list(forest.last_chunks)]
        singles = sequences[len(step.plan.runs) :]
        if singles:
            tokens = torch.tensor([s.first_query for s in singles])
            slots = torch.tensor([s.slot for s in singles])
            query, key, value, log_decay, beta = (x[tokens] for x in inputs)
            read, last = delta_rule_step(query, key, value, log_decay, beta, memory_Snkv[slots])
            output_Nnv[tokens] = read
            memory_Snkv[slots] = last
        return output_Nnv


class SimpleDelta(DeltaAttention):
    """SimpleGDN: the delta rule on the old projections, without any parameter of its own."""

    def __init__(
        self, pattern: AttentionPattern, layer: int, *, num_heads: int, widths: tuple[int, int]
    ) -> None:
        super().__init__(pattern, layer)
        self.memory_shape = MemoryShape(num_heads, *widths)
        self._log_decay, self._beta = math.log(pattern.simple_decay), pattern.simple_beta

    def forward(
        self,
        x: Float[Tensor, "T hidden"],
        query_Nnk: Float[Tensor, "N n k"],
        key_Nnk: Float[Tensor, "N n k"],
        value_Nnv: Float[Tensor, "N n v"],
        step: Pass,
    ) -> Float[Tensor, "N n v"]:
        """Read with constant decay and beta."""
        constant_Nn = _precise(query_Nnk).new_ones(query_Nnk.shape[:2])
        log_decay_Nn, beta_Nn = constant_Nn * self._log_decay, constant_Nn * self._beta
        return self._attend(query_Nnk, key_Nnk, value_Nnv, log_decay_Nn, beta_Nn, step)


class GatedDelta(DeltaAttention):
    """Gated DeltaNet on the old projections."""

    def __init__(
        self,
        pattern: AttentionPattern,
        layer: int,
        *,
        num_heads: int,
        widths: tuple[int, int],
        hidden_size: int,
        eps: float,
    ) -> None:
        super().__init__(pattern, layer)
        key_width, value_width = widths
        channels = num_heads * (2 * key_width + value_width)
        self.memory_shape = MemoryShape(num_heads, key_width, value_width, channels, NUM_TAPS - 1)
        self.conv_weight = nn.Parameter(torch.empty(channels, NUM_TAPS))
        self.a_proj = Linear(hidden_size, num_heads)
        self.b_proj = Linear(hidden_size, num_heads)
        self.g_proj = Linear(hidden_size, num_heads * value_width)
        self.a_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.o_norm = RMSNorm(value_width, eps=eps)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Set what is no plain matrix: a convolution that changes nothing yet, and slow decays.

        Decay rates and time steps are drawn as in Mamba2, from which Gated DeltaNet has them: rates uniform
        in 1..16, steps log-uniform in 0.001..0.1.
        """
        self.conv_weight.zero_()
        self.conv_weight[:, -1] = 1.0
        heads = len(self.a_log)
        self.a_log.copy_((1 + 15 * torch.rand(heads, generator=generator)).log())
        low, high = math.log(1e-3), math.log(0.1)
        step = (low + (high - low) * torch.rand(heads, generator=generator)).exp()
        self.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # softplus of it is the step

    def forward(
        self,
        x: Float[Tensor, "T hidden"],
        query_Nnk: Float[Tensor, "N n k"],
        key_Nnk: Float[Tensor, "N n k"],
        value_Nnv: Float[Tensor, "N n v"],
        step: Pass,
    ) -> Float[Tensor, "N n v"]:
        """Convolve, read with decays and betas from the hidden state, normalise and gate."""
        n = step.num_tokens
        widths = [query_Nnk.shape[1] * t.shape[2] for t in (query_Nnk, key_Nnk, value_Nnv)]
        channels_Nc = torch.cat([t.flatten(1) for t in (query_Nnk, key_Nnk, value_Nnv)], dim=1)
        convolved = torch.split(F.silu(self._convolve(_precise(channels_Nc), step)), widths, dim=1)
        query_Nnk, key_Nnk, value_Nnv = (t.reshape(n, query_Nnk.shape[1], -1) for t in convolved)
        rate_n = -_precise(self.a_log).exp()
        log_decay_Nn = rate_n * F.softplus(_precise(self.a_proj(x)[:n]) + self.dt_bias)
        beta_Nn = _precise(self.b_proj(x)[:n]).sigmoid()
        read = self._attend(query_Nnk, key_Nnk, value_Nnv, log_decay_Nn, beta_Nn, step)
        gate_Nnv = F.silu(self.g_proj(x)[:n]).view(read.shape)
        normed = self.o_norm(read.to(x.dtype).flatten(0, 1)).view(read.shape)
        gated_Nnv: Tensor = normed * gate_Nnv
        return gated_Nnv

    def _convolve(self, channels_Nc: Tensor, step: Pass) -> Tensor:
        weight = _precise(self.conv_weight)
        n = step.num_tokens
        if step.cache is None:
            rows = packed_taps(step.plan.runs, num_tokens=n, num_taps=NUM_TAPS)
            return causal_convolution(channels_Nc, weight, rows)
        assert isinstance(step.cache, HybridCache)
        sequences = step.cache.sequences(step.plan)
        slots = torch.tensor([sequence.slot for sequence in sequences])
        before_SJc = step.cache.before(self._layer)
        before_Bc = before_SJc[slots].flatten(0, 1)
        rows, next_rows = cached_taps(sequences, num_tokens=n, num_taps=NUM_TAPS)
        before_SJc[slots] = torch.cat([channels_Nc, before_Bc])[next_rows]
        return causal_convolution(channels_Nc, weight, rows, before_Bc)


def delta_attention(
    pattern: AttentionPattern,
    layer: int,
    *,
    is_gated: bool,
    num_heads: int,
    widths: tuple[int, int],
    hidden_size: int,
    eps: float,
) -> DeltaAttention:
    """Build GDN or SimpleGDN for heads whose keys and values have these widths."""
    if not is_gated:
        return SimpleDelta(pattern, layer, num_heads=num_heads, widths=widths)
    return GatedDelta(
        pattern, layer, num_heads=num_heads, widths=widths, hidden_size=hidden_size, eps=eps
    )


def _scan(
    forest: ChunkForest, inputs: tuple[Tensor, ...], memory_Xnkv: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Run the delta rule over a forest of chunks.

    Args:
        forest: of the tokens.
        inputs: query, key, value, logarithm of the decay, beta; tokens first, then heads.
        memory_Xnkv: what the sequences continue, by chunk of depth 0; None where they begin.

    Returns:
        what each token reads, and the memories after the chunks of each depth.
    """
    parts = _parts(forest, inputs)
    if memory_Xnkv is None:
        shape = (len(forest.root_runs), *parts.reader.shape[1:2])
        memory_Xnkv = parts.reader.new_zeros(
            (*shape, parts.reader.shape[-1], parts.update.shape[-1])
        )
    outputs: list[Tensor] = []
    memories: list[Tensor] = []
    for depth, level in enumerate(forest.levels):
        if depth:
            memory_Xnkv = memories[-1][forest.parents[depth - 1].to(memories[-1].device)]
        read, after = chunk_step(parts.rows(level), memory_Xnkv)
        outputs.append(read)
        memories.append(after)
    read_Nnv = forest.scatter(torch.cat(outputs).transpose(1, 2))
    return read_Nnv, memories


def _parts(forest: ChunkForest, inputs: tuple[Tensor, ...]) -> ChunkParts:
    query, key, value, log_decay, beta = (forest.gather(x).transpose(1, 2) for x in inputs)
    return chunk_parts(query, key, value, log_decay, beta)


def _unit_length(x: Tensor) -> Tensor:
    """Return vectors of length 1, in fp32 or better; next to zero they stay short."""
    x = _precise(x)
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
