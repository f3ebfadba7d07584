"""What LongArc computes inside transformers' layers: attention over a plan, and routed experts.

transformers lets a model name the functions that do both. These two know packed documents, shared prompts and
slots of a cache, and their results for a token do not depend on what else is in the pass, which makes the engine's
log-probabilities those of the trainer.

Shape letters: T padded rows, N tokens, n heads, g key heads, k experts per token, d key width, v value width.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longarc.models.attention import dense_attention
from longarc.models.decoder_base import Pass, with_padding
from longarc.models.kernels import attention as native_attention
from longarc.models.moe import mixed_experts


def attend(
    module: nn.Module,
    query_1nTd: Float[Tensor, "1 n T d"],
    key_1gTd: Float[Tensor, "1 g T d"],
    value_1gTv: Float[Tensor, "1 g T v"],
    attention_mask: None,
    *,
    scaling: float,
    step: Pass,
    **_: Any,
) -> tuple[Float[Tensor, "1 T n v"], None]:
    """Attend from each token to what the plan of the pass lets it see; an attention function of transformers.

    Args:
        module: transformers' attention; gives the layer.
        query_1nTd: rotated queries of all rows, as one sequence.
        key_1gTd: rotated keys.
        value_1gTv: values.
        attention_mask: is not read; the plan says who sees whom.
        scaling: factor on the scores, YaRN's included.
        step: the pass; the layer hands it on.
        _: what other attention functions read, dropout of probability 0 among it.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    query_Nnd, key_Ngd, value_Ngv = (
        rows[0, :, : step.num_tokens].transpose(0, 1) for rows in (query_1nTd, key_1gTd, value_1gTv)
    )
    key_Rgd = step.table("keys", layer, key_Ngd.flatten(1)).view(-1, *key_Ngd.shape[1:])
    value_Rgv = step.table("values", layer, value_Ngv.flatten(1)).view(-1, *value_Ngv.shape[1:])
    if step.flat_runs is not None:
        attended_Nnv = native_attention.dense_attention(
            step.flat_runs,
            query_Nnd,
            key_Rgd,
            value_Rgv,
            value_width=value_Rgv.shape[2],
            scale=scaling,
        )
    else:
        attended_Nnv = dense_attention(query_Nnd, key_Rgd, value_Rgv, step.plan, scale=scaling)
    return with_padding(attended_Nnv, query_1nTd[0, 0])[None], None


def mix(
    module: nn.Module,
    x: Float[Tensor, "T hidden"],
    chosen_Tk: Int[Tensor, "T k"],
    weight_Tk: Float[Tensor, "T k"],
) -> Float[Tensor, "T hidden"]:
    """Return for each row the weighted sum of its experts' outputs; an experts function of transformers."""
    gate_up: Tensor = module.gate_up_proj  # type: ignore[assignment]
    down: Tensor = module.down_proj  # type: ignore[assignment]
    # transformers' router promises no order of the chosen, and the sum is rounded in their order.
    chosen_Tk, order_Tk = chosen_Tk.sort(dim=-1)
    weight_Tk = weight_Tk.gather(-1, order_Tk).to(x.dtype)
    counts_E = torch.bincount(chosen_Tk.flatten(), minlength=len(gate_up))
    return mixed_experts(x, chosen_Tk, weight_Tk, counts_E, gate_up, down)
