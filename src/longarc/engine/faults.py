"""Where do numbers stop being finite? Asked once for a sequence whose logits were not.

The sequence's tokens go through the model again, without a cache, and the first part whose output is not finite is
named, with the first of its weights that is not.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longarc.engine.pages import Ids
from longarc.errors import EngineError, LongArcError, boundary
from longarc.models.decoder_base import Decoder, LayerOutput
from longarc.models.layout import Layout
from longarc.models.projection import project_logits


class _Found(Exception):  # noqa: N818 - ends the pass as soon as it has shown what it was made for
    """The first part whose output is not finite."""


def fault_of(model: Decoder, tokens: Ids, *, attention: Literal["dense", "sparse"]) -> str:
    """Say in words which part of the model makes numbers that are not finite of these tokens.

    Costs a pass over all of them.

    Args:
        model: computed the logits.
        tokens: prompt and all that was sampled before the logits that were not finite.
        attention: how the model attends.
    """
    try:
        with boundary(EngineError, "the pass that looks for the layer failed"):
            return _first_fault(model, tokens, attention)
    except LongArcError as error:
        return f"which layer it is cannot be said: {error}"


@torch.inference_mode()
def _first_fault(model: Decoder, tokens: Ids, attention: Literal["dense", "sparse"]) -> str:
    ids = torch.from_numpy(tokens)

    def check(where: str, module: nn.Module, output: Any) -> None:
        rows = _rows(output, len(ids))
        if rows is not None and not bool(torch.isfinite(rows).all()):
            raise _Found(
                f"the first output that is not finite is that of {where}, {_weights(module)}"
            )

    with ExitStack() as hooks:
        for where, module in _parts(model):
            hook = module.register_forward_hook(
                lambda module, _, output, where=where: check(where, module, output)
            )
            hooks.callback(hook.remove)
        try:
            hidden = model(ids, Layout.documents([len(ids)]), attention=attention).hidden
        except _Found as found:
            return str(found)
    logits = project_logits(hidden[-1:], model.output_weight, compute_dtype=model.compute_dtype)
    if bool(torch.isfinite(logits).all()):
        return (
            "computed again from the tokens, every layer is finite: rows of the cache are at fault, which other weights "
            "may have computed"
        )
    head: nn.Module = model.model.embed_tokens if model.lm_head is None else model.lm_head
    return f"the first output that is not finite is that of the head, {_weights(head)}"


def _parts(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """Yield what a pass goes through, in words; of a layer its parts before their sum."""
    yield "the embedding", model.model.embed_tokens
    for index, layer in enumerate(model.model.layers):
        for name, module in layer.named_children():
            yield f"{_kind(name)} of layer {index}", module
        yield f"layer {index}, the sum of its parts", layer
    yield "the final norm", model.model.norm


def _kind(name: str) -> str:
    if "norm" in name:
        return f"the norm {name}"
    return "the attention" if "attn" in name else "the feed-forward"


def _rows(output: Any, num_tokens: int) -> Tensor | None:
    """Return the rows that are tokens; None where a part returns something else."""
    if isinstance(output, LayerOutput):
        output = output.hidden
    if isinstance(output, tuple):
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    return output.reshape(-1, output.shape[-1])[:num_tokens]


def _weights(module: nn.Module) -> str:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"whose weight {name} holds numbers that are not finite"
    return "whose weights are finite: its numbers grew too large"
