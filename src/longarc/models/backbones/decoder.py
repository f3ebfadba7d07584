"""A decoder whose layers are transformers' own: GLM-4 to GLM-4.7 (``glm``, ``glm4``, ``glm4_moe``, ``glm4_moe_lite``).

Embedding, projections, norms, rotation, feed-forwards and router are transformers' code, with its parameter names.
Attention and routed experts are ours (`longarc.models.backbones.parts`); so a pass knows packed documents, shared
prompts and cache slots like any other decoder's.

Latent attention (``glm4_moe_lite``) keeps expanded keys and values in the cache, not the latent: transformers'
layer expands before it attends.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longarc.config.transformers_model import TransformersConfig
from longarc.errors import ContractError
from longarc.models.activations import Activations
from longarc.models.backbones.classes import causal_lm, rotary_embedding, transformers_config
from longarc.models.cache import CacheShape, PagedCache
from longarc.models.decoder_base import (
    Decoder,
    DecoderLayer,
    DecoderStack,
    LayerOutput,
    Pass,
)
from longarc.models.kernels.decode import NativeDecoder
from longarc.models.kernels.native import native_for
from longarc.models.layers import Rotation
from longarc.models.room import check_room
from longarc.models.selection import Selection


class TransformersRotation(Rotation):
    """Cosines and sines of transformers' rotary embedding, YaRN included; its layers apply them."""

    def __init__(self, embeddings: tuple[Tensor, Tensor]) -> None:
        self.embeddings = embeddings
        """Of each row, [1, rows, width] each, with the embedding's own scaling."""

    def apply(self, x_Tnd: Float[Tensor, "T n d"]) -> Float[Tensor, "T n d"]:
        """Refuse: which numbers form a pair differs from class to class, and only the class knows.

        Raises:
            ContractError: always.
        """
        raise ContractError("transformers' layers rotate queries and keys themselves")


class _RunLayer(DecoderLayer):
    """One of transformers' layers, called like ours; made for a pass, so that it adds nothing to any name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: Float[Tensor, "rows hidden"], step: Pass, selection: Selection | None = None
    ) -> LayerOutput:
        """Apply the layer to all rows."""
        assert isinstance(step.rotation, TransformersRotation)
        feed_forward: Any = self.layer.mlp
        with _chosen_experts(feed_forward) as chosen:
            rows = self.layer(
                hidden[None],
                position_embeddings=step.rotation.embeddings,
                attention_mask=None,
                step=step,
            )[0]
        if not chosen:
            return LayerOutput(rows)
        routed = chosen[0][: step.num_tokens].flatten()
        counts = torch.bincount(routed, minlength=feed_forward.gate.num_experts)
        return LayerOutput(rows, expert_counts=counts)


@contextmanager
def _chosen_experts(feed_forward: Any) -> Iterator[list[Tensor]]:
    """Collect the experts that the router chooses meanwhile, which its layer keeps to itself."""
    chosen: list[Tensor] = []
    if not hasattr(feed_forward, "experts"):
        yield chosen
        return
    hook = feed_forward.gate.register_forward_hook(lambda *call: chosen.append(call[2][2]))
    try:
        yield chosen
    finally:  # a recomputation in backward ends with an exception as soon as it has what it needs
        hook.remove()


class TransformersStack(DecoderStack):
    """Embedding, layers and final norm of transformers' model."""

    def __init__(self, inner: Any) -> None:
        nn.Module.__init__(self)
        self.embed_tokens = inner.embed_tokens
        self.layers = inner.layers
        self.norm = inner.norm

    def forward(
        self, token_ids: Tensor, step: Pass, activations: Activations | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run all rows through all layers; return the rows, no indexer losses, and expert counts."""
        hidden = self.embed_tokens(token_ids)
        if step.flat_runs is None and native_for(hidden):
            # The attention of training over the cache too: what is added up in one order agrees to the last bit.
            step = replace(step, flat_runs=step.plan.flat_runs())
        callables = nn.ModuleList([_RunLayer(layer) for layer in self.layers])
        counts: list[Tensor] = []
        for layer in callables if activations is None else activations.managed(callables):
            output: LayerOutput = layer(hidden, step, None)
            hidden = output.hidden
            if output.expert_counts is not None:
                counts.append(output.expert_counts)
        return self.norm(hidden), [], counts


class TransformersDecoder(Decoder):
    """A causal language model of transformers."""

    model: TransformersStack

    def __init__(self, config: TransformersConfig) -> None:
        """Build it; weights are drawn or loaded by the caller.

        Raises:
            ConfigError: transformers is not installed, or refuses the settings.
        """
        super().__init__()
        self.config: TransformersConfig = config
        settings = transformers_config(config)
        whole = causal_lm(config, settings)
        self.model = TransformersStack(whole.model)
        self.lm_head = None if settings.tie_word_embeddings else whole.lm_head
        self.mtp = _carried_mtp(whole.model, settings) if config.carries_mtp else None
        # Its method and not the module: a cast of the model must not round the frequencies.
        self._embeddings_at = rotary_embedding(whole.model, settings).forward
        self._fp32_names = tuple(whole._keep_in_fp32_modules_strict or ())

    def keep_fp32(self) -> None:
        """Make fp32 again, after a cast of the model, what its class keeps in fp32: the router."""
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if any(part in name for part in self._fp32_names):
                tensor.data = tensor.data.float()

    def cache_widths(self) -> dict[str, int]:
        """Return the widths of key and value rows, all heads together."""
        attention: Any = self.model.layers[0].self_attn
        if self.config.family == "glm4_moe_lite":
            heads = attention.num_heads
            return {"keys": heads * attention.qk_head_dim, "values": heads * attention.v_head_dim}
        return {"keys": attention.k_proj.out_features, "values": attention.v_proj.out_features}

    def rotation(self, positions: Int[Tensor, " rows"]) -> Rotation:
        """Return the rotation that the class computes, in the dtype of the weights as it does."""
        return TransformersRotation(self._embeddings_at(self.output_weight, positions[None]))

    def _cache_of(self, shape: CacheShape) -> PagedCache:
        weight = self.output_weight
        return PagedCache(
            self.cache_widths(),
            shape,
            num_layers=len(self.model.layers),
            dtype=weight.dtype,
            device=weight.device,
        )

    def _native_cache(self, shape: CacheShape) -> NativeDecoder:
        raise ContractError("the native decode kernels do not know transformers' layers")


def build_transformers(
    config: TransformersConfig, *, seed: int, dtype: torch.dtype = torch.float32
) -> TransformersDecoder:
    """Build the model on the CPU and draw its weights: normal matrices, unit norms, zero biases.

    Raises:
        ConfigError: transformers is not installed, or refuses the settings.
        ResourceError: the memory cannot hold the weights.
    """
    model = transformers_without_memory(config, dtype)
    model.to_empty(device="cpu")
    model.keep_fp32()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(drawn.normal_(std=config.initializer_range, generator=generator))
        for buffer in model.buffers():
            buffer.zero_()
    return model


def transformers_without_memory(
    config: TransformersConfig, dtype: torch.dtype
) -> TransformersDecoder:
    """Build the model on torch's meta device, if the memory could hold it.

    Raises:
        ConfigError: transformers is not installed, or refuses the settings.
        ResourceError: the memory cannot hold the weights.
    """
    model = TransformersDecoder(config)
    model.to(dtype)
    check_room(model.state_dict(), config.hf_config)
    return model


def _carried_mtp(inner: Any, settings: Any) -> nn.Module:
    """Return a layer with the tensors of a published layer for multi-token prediction, which none computes with."""
    last = inner.layers[-1]
    layer_index, width = len(inner.layers), settings.hidden_size
    own = copy.deepcopy(settings)
    if hasattr(own, "mlp_layer_types"):
        own.mlp_layer_types = ["sparse"] * (layer_index + 1)
    else:
        own.first_k_dense_replace = 0

    def norm() -> nn.Module:
        made: nn.Module = type(last.input_layernorm)(width, eps=settings.rms_norm_eps)
        return made

    with torch.device("meta"):
        mtp: nn.Module = type(last)(own, layer_index)
        mtp.enorm, mtp.hnorm = norm(), norm()
        mtp.eh_proj = nn.Linear(2 * width, width, bias=False)
        mtp.shared_head = nn.ModuleDict({"norm": norm()})
    return mtp.requires_grad_(False)
