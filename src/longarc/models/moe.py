"""Mixture of experts with a sigmoid router, as in GLM-5: routed experts, a shared one, no auxiliary loss.

Source: GLM-5, arXiv:2602.15763, section 3; balancing: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
Shape letters: T padded rows, k experts per token, E experts.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from longarc.algos.int4 import int4_linear
from longarc.config.model import GlmMoeDsaConfig
from longarc.models.kernels import mixture as native_mixture
from longarc.models.kernels import rows as native_rows
from longarc.models.kernels.native import native_for
from longarc.models.layers import SwiGLU

MIN_EXPERT_ROWS = 16
"""Rows given to one expert's product at least; fewer would take a kernel that rounds differently."""


class Router(nn.Module):
    """Chooses experts by sigmoid score plus a bias that only balancing moves."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        self._num_chosen = config.num_experts_per_tok
        self._normalise, self._scale = config.norm_topk_prob, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32)
        )

    def forward(
        self, x: Float[Tensor, "T hidden"], given_Tk: Int[Tensor, "T k"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return chosen experts [T, k], best first and ties to the lower index, and their weights [T, k].

        Where experts are given, they are the chosen ones, whatever the scores say.
        """
        if native_for(x, self.weight):
            return native_mixture.route(
                native_rows.linear(x, self.weight),
                self.e_score_correction_bias,
                num_chosen=self._num_chosen,
                normalise=self._normalise,
                scale=self._scale,
                given_Tk=given_Tk,
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        score_TE = F.linear(x.to(dtype), self.weight.to(dtype)).sigmoid()
        preference_TE = score_TE.detach() + self.e_score_correction_bias
        chosen_Tk = preference_TE.sort(dim=-1, descending=True, stable=True).indices
        chosen_Tk = chosen_Tk[:, : self._num_chosen] if given_Tk is None else given_Tk
        weight_Tk = score_TE.gather(1, chosen_Tk)
        if self._normalise:
            weight_Tk = weight_Tk / (weight_Tk.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen_Tk, (weight_Tk * self._scale).to(x.dtype)


class Experts(nn.Module):
    """All routed experts, stacked."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        experts, width, hidden = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        """Gate rows first, then up rows."""
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(
        self,
        x: Float[Tensor, "T hidden"],
        chosen_Tk: Tensor,
        weight_Tk: Tensor,
        counts_E: Tensor,
        *,
        int4_group_size: int | None = None,
    ) -> Float[Tensor, "T hidden"]:
        """Return for each token the weighted sum of its experts' outputs, in the order of its choice.

        With ``int4_group_size`` the experts compute with what INT4 leaves of their weights, rounded anew in
        backward: kept until then, it would be a second copy of all experts of the model.
        """
        return mixed_experts(
            x,
            chosen_Tk,
            weight_Tk,
            counts_E,
            self.gate_up_proj,
            self.down_proj,
            int4_group_size=int4_group_size,
        )


def mixed_experts(
    x: Float[Tensor, "T hidden"],
    chosen_Tk: Int[Tensor, "T k"],
    weight_Tk: Float[Tensor, "T k"],
    counts_E: Int[Tensor, " E"],
    gate_up_proj: Float[Tensor, "E twice_width hidden"],
    down_proj: Float[Tensor, "E hidden width"],
    *,
    int4_group_size: int | None = None,
) -> Float[Tensor, "T hidden"]:
    """Return for each row the weighted sum of its experts' outputs, in the order of its choice.

    Args:
        x: rows.
        chosen_Tk: experts of each row.
        weight_Tk: of each chosen expert.
        counts_E: rows of each expert.
        gate_up_proj: gate rows first, then up rows.
        down_proj: output projections.
        int4_group_size: compute with what INT4 leaves of both, in groups of that many numbers.
    """
    if native_for(x, gate_up_proj, down_proj):
        return native_mixture.mix_experts(
            x,
            chosen_Tk.to(torch.int32),
            weight_Tk,
            gate_up_proj,
            down_proj,
            int4_group_size=int4_group_size,
        )
    num_chosen = chosen_Tk.shape[1]
    order = chosen_Tk.flatten().argsort(stable=True)
    sorted_rows = torch.split(x.index_select(0, order // num_chosen), counts_E.tolist())
    outputs = [
        _expert(rows, gate_up, down, int4_group_size)
        for rows, gate_up, down in zip(
            sorted_rows, gate_up_proj.unbind(), down_proj.unbind(), strict=True
        )
    ]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    # Summed slot after slot and not scattered expert after expert, so that the order of addition
    # does not depend on the other tokens.
    slots = (
        torch.cat(outputs).index_select(0, back).view(*chosen_Tk.shape, -1) * weight_Tk[..., None]
    )
    first, *others = slots.unbind(1)
    for other in others:
        first = first + other
    return first


def _expert(rows: Tensor, gate_up: Tensor, down: Tensor, int4_group_size: int | None) -> Tensor:
    num_rows = rows.shape[0]
    if num_rows == 0:
        return rows
    if num_rows < MIN_EXPERT_ROWS:
        rows = F.pad(rows, (0, 0, 0, MIN_EXPERT_ROWS - num_rows))
    linear = (
        F.linear if int4_group_size is None else partial(int4_linear, group_size=int4_group_size)
    )
    gate, up = linear(rows, gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down)[:num_rows]


class MixtureOfExperts(nn.Module):
    """Routed experts plus a shared expert that every token uses, unscaled."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = (
            SwiGLU(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)
            if config.n_shared_experts
            else None
        )

    def forward(
        self,
        x: Float[Tensor, "T hidden"],
        num_tokens: int,
        *,
        int4_group_size: int | None = None,
        given_Nk: Int[Tensor, "N k"] | None = None,
        note: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of each row, and how many of the first ``num_tokens`` rows went to each expert.

        Args:
            x: rows.
            num_tokens: N; the rows behind are padding.
            int4_group_size: as in `mixed_experts`.
            given_Nk: experts of each token, in place of the router's choice.
            note: told the experts of each token, [N, k].
        """
        num_experts = len(self.gate.e_score_correction_bias)
        chosen_Tk, weight_Tk = self.gate(x, None if given_Nk is None else _padded(given_Nk, len(x)))
        if note is not None:
            note(chosen_Tk[:num_tokens])
        counts_E = torch.bincount(chosen_Tk.flatten(), minlength=num_experts)
        output = self.experts(x, chosen_Tk, weight_Tk, counts_E, int4_group_size=int4_group_size)
        if self.shared_experts is not None:
            output = output + self.shared_experts(x)
        padding_E = torch.bincount(chosen_Tk[num_tokens:].flatten(), minlength=num_experts)
        return output, counts_E - padding_E


def _padded(given_Nk: Tensor, num_rows: int) -> Tensor:
    """Give the padding rows experts too: different ones, as a router does."""
    num_tokens, num_chosen = given_Nk.shape
    some = torch.arange(num_chosen, device=given_Nk.device)
    return torch.cat([given_Nk, some.expand(num_rows - num_tokens, -1)])


@torch.no_grad()
def update_router_bias(
    model: nn.Module, expert_counts: Num[Tensor, "moe_layers experts"], rate: float
) -> None:
    """Move every router's bias towards balance: ``b += rate (d - mean d)``, ``d = sign(mean load - load)``.

    Called once per optimizer step with the counts of the whole batch. The mean of the move is
    subtracted, so that biases do not drift together.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (loss-free balancing).

    Args:
        model: the layers of a decoder, or one of them; routers are taken in their order.
        expert_counts: tokens per layer and expert.
        rate: step [score units]; 1e-3 in DeepSeek-V3, 0 in GLM-5's RL.
    """
    # By its buffer, which transformers' routers have under the same name.
    biases = [
        buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] == "e_score_correction_bias"
    ]
    for bias, load in zip(biases, expert_counts.to(torch.float32), strict=True):
        move = (load.mean() - load).sign()
        bias += rate * (move - move.mean())
