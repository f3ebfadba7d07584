"""Routed experts with gradients. The eager twins are ``Router`` and ``Experts`` in ``longarc.models.moe``.

Shape letters: T rows, k experts per row, E experts.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.algos.int4 import int4_rounded
from longarc.models.kernels.native import required


def route(
    logits_TE: Float[Tensor, "T E"],
    bias_E: Float[Tensor, " E"],
    *,
    num_chosen: int,
    normalise: bool,
    scale: float,
    given_Tk: Int[Tensor, "T k"] | None = None,
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
    """Return chosen experts, best first and ties to the lower index, and their weights.

    Args:
        logits_TE: of the router.
        bias_E: added to the scores for the choice alone.
        num_chosen: k.
        normalise: whether weights of a row add up to the scale.
        scale: of the weights.
        given_Tk: these are chosen, whatever the scores say; their weights are those that they would have had if the
            scores had chosen them, to the last bit.
    """
    output: tuple[Tensor, Tensor] = _Route.apply(  # type: ignore[no-untyped-call]
        logits_TE, bias_E, num_chosen, normalise, scale, given_Tk
    )
    return output


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor,
        num_chosen: int,
        normalise: bool,
        scale: float,
        given: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, experts = logits.shape
        scores = logits.clone(memory_format=torch.contiguous_format)
        chosen = torch.empty(rows, num_chosen, dtype=torch.int32)
        weights = logits.new_empty(rows, num_chosen)
        required().call(
            "route", rows, experts, num_chosen, scores, bias, normalise, scale, chosen, weights
        )
        if given is not None:
            # The kernel left the scores of all experts in place of the logits.
            chosen = given.to(torch.int32)
            weights = _weights_of(scores.gather(1, given), normalise, scale)
        ctx.save_for_backward(scores, chosen)
        ctx.normalise, ctx.scale = normalise, scale
        ctx.mark_non_differentiable(chosen)
        return chosen, weights

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad_Tk: Tensor) -> tuple[Tensor | None, ...]:
        scores_TE, chosen_Tk = ctx.saved_tensors
        index_Tk = chosen_Tk.long()
        score_Tk = scores_TE.gather(1, index_Tk)
        grad_Tk = grad_Tk * ctx.scale
        if ctx.normalise:
            total_T1 = score_Tk.sum(dim=1, keepdim=True) + 1e-20
            shift_T1 = (grad_Tk * score_Tk).sum(dim=1, keepdim=True) / total_T1
            grad_Tk = (grad_Tk - shift_T1) / total_T1
        grad_Tk = grad_Tk * score_Tk * (1 - score_Tk)
        return torch.zeros_like(scores_TE).scatter_(1, index_Tk, grad_Tk), *[None] * 5


def _weights_of(scores_Tk: Tensor, normalise: bool, scale: float) -> Tensor:
    """Return the weights as the kernel computes them: a sum slot after slot, one factor for the row."""
    if not normalise:
        return scores_Tk * scale
    first, *others = scores_Tk.unbind(1)
    for other in others:
        first = first + other
    return scores_Tk * (torch.tensor(scale) / (first + 1e-20))[:, None]


def mix_experts(
    x: Float[Tensor, "T hidden"],
    chosen_Tk: Int[Tensor, "T k"],
    weight_Tk: Float[Tensor, "T k"],
    gate_up: Float[Tensor, "E twice_width hidden"],
    down: Float[Tensor, "E hidden width"],
    *,
    int4_group_size: int | None = None,
) -> Float[Tensor, "T hidden"]:
    """Return for each row the weighted sum of its experts' outputs, in the order of its choice.

    Args:
        x: rows.
        chosen_Tk: int32, as ``route`` returns them.
        weight_Tk: of each chosen expert.
        gate_up: gate rows first, then up rows.
        down: output projections.
        int4_group_size: compute with what INT4 leaves of both, in groups of that many numbers.
    """
    output: Tensor = _MixExperts.apply(x, chosen_Tk, weight_Tk, gate_up, down, int4_group_size)  # type: ignore[no-untyped-call]
    return output


class _MixExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        group_size: int | None,
    ) -> Tensor:
        x, weights = x.contiguous(), weights.contiguous()
        pairs, hidden = chosen.numel(), x.shape[1]
        output = torch.empty_like(x)
        sorted_gate_up = x.new_empty(pairs, gate_up.shape[1])
        slot_out = x.new_empty(pairs, hidden)
        required().call(
            "experts",
            *_sizes(x, chosen, down),
            *(x, chosen, weights, _used(gate_up, group_size), _used(down, group_size)),
            *(output, sorted_gate_up, slot_out),
            torch.get_num_threads(),
        )
        ctx.save_for_backward(x, chosen, weights, gate_up, down, sorted_gate_up, slot_out)
        ctx.group_size = group_size
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, chosen, weights, gate_up, down, sorted_gate_up, slot_out = ctx.saved_tensors
        grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        required().call(
            "experts_backward",
            *_sizes(x, chosen, down),
            *(x, chosen, weights, _used(gate_up, ctx.group_size), _used(down, ctx.group_size)),
            *(sorted_gate_up, slot_out, grad.contiguous()),
            *(grad_x, grad_weights, grad_gate_up, grad_down),
            torch.get_num_threads(),
        )
        return grad_x, None, grad_weights, grad_gate_up, grad_down, None


def _used(weight: Tensor, group_size: int | None) -> Tensor:
    """Return what the product is computed with; rounding twice costs less than keeping it until backward."""
    if group_size is None:
        return weight
    rounded = torch.empty_like(weight)
    for target, matrix in zip(
        rounded, weight, strict=True
    ):  # what comes up between stays in the cache
        target.copy_(int4_rounded(matrix, group_size))
    return rounded


def _sizes(x: Tensor, chosen: Tensor, down: Tensor) -> tuple[int, int, int, int, int]:
    experts, hidden, width = down.shape
    return experts, chosen.shape[1], hidden, width, x.shape[0]
