"""Grouped-query attention over a window, or replaced by the delta rule; the projections stay what they are."""

from jaxtyping import Float
from torch import Tensor

from longarc.config.model import LlamaHybridConfig
from longarc.models.decoder_base import Pass, with_padding
from longarc.models.llama import GroupedQueryAttention, head_width
from longarc.models.variants.delta import delta_attention
from longarc.models.variants.memory import MemoryShape
from longarc.models.variants.windows import windowed_attention


class FullGroupedAttention(GroupedQueryAttention):
    """Grouped-query attention over all earlier tokens."""

    memory_shape: MemoryShape | None = None
    """What the layer remembers of a sequence instead of rows."""


class WindowGroupedAttention(FullGroupedAttention):
    """Grouped-query attention over a sliding window."""

    def __init__(self, config: LlamaHybridConfig, layer: int) -> None:
        super().__init__(config, layer)
        self._window = config.pattern.window

    def forward(self, x: Float[Tensor, "T hidden"], step: Pass) -> Float[Tensor, "T hidden"]:
        """Attend to the window of each token."""
        width, n = self._width, step.num_tokens
        query_Tnd, key_Tgd = (step.rotation.apply(heads) for heads in self._query_and_key(x))
        keys = step.table("keys", self._layer, key_Tgd.flatten(1)[:n])
        values = step.table("values", self._layer, self.v_proj(x)[:n])
        attended_Nnd = windowed_attention(
            query_Tnd[:n],
            keys.view(len(keys), -1, width),
            values.view(len(values), -1, width),
            step.plan,
            window=self._window,
            scale=float(width) ** -0.5,
        )
        output: Tensor = self.o_proj(with_padding(attended_Nnd, x).flatten(1))
        return output


class DeltaGroupedAttention(FullGroupedAttention):
    """The delta rule on the queries, keys and values of grouped-query attention, keys and values repeated."""

    def __init__(self, config: LlamaHybridConfig, layer: int, *, is_gated: bool) -> None:
        super().__init__(config, layer)
        pattern, heads = config.pattern, config.num_attention_heads
        self._rotates = pattern.rotates_delta
        self._repeats = heads // config.num_key_value_heads
        widths = (head_width(config), head_width(config))
        self.delta = delta_attention(
            pattern,
            layer,
            is_gated=is_gated,
            num_heads=heads,
            widths=widths,
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
        )
        self.memory_shape = self.delta.memory_shape

    def forward(self, x: Float[Tensor, "T hidden"], step: Pass) -> Float[Tensor, "T hidden"]:
        """Return the output of the delta rule."""
        n = step.num_tokens
        query_Tnd, key_Tgd = self._query_and_key(x)
        value_Tgd = self.v_proj(x).view(len(x), -1, self._width)
        if self._rotates:
            query_Tnd, key_Tgd = step.rotation.apply(query_Tnd), step.rotation.apply(key_Tgd)
        key_Tnd, value_Tnd = (
            t.repeat_interleave(self._repeats, dim=1) for t in (key_Tgd, value_Tgd)
        )
        read_Nnd = self.delta(x, query_Tnd[:n], key_Tnd[:n], value_Tnd[:n], step)
        output: Tensor = self.o_proj(with_padding(read_Nnd, x).flatten(1))
        return output


def grouped_attention(config: LlamaHybridConfig, layer: int) -> FullGroupedAttention:
    """Build what the pattern says for a layer."""
    match config.pattern.layers[layer]:
        case "S":
            return WindowGroupedAttention(config, layer)
        case "G" | "D" as letter:
            return DeltaGroupedAttention(config, layer, is_gated=letter == "G")
        case _:
            return FullGroupedAttention(config, layer)
