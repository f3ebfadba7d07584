"""Which optimizer updates a parameter, and which matrices are orthogonalised inside it.

Pure functions of name, shape and config, so that the rule for any model can be read and tested
without a model.
"""

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from longarc.config.model import GlmMoeDsaConfig, ModelConfig
from longarc.config.transformers_model import TransformersConfig
from longarc.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonRule:
    """Orthogonalise blocks of the parameter, each by itself.

    The parameter is read as ``num_blocks`` stacked blocks (heads, experts), and each block as
    matrices of ``rows`` rows laid end to end.
    """

    num_blocks: int
    rows: tuple[int, ...]
    """Rows of each matrix of one block; their sum times ``num_blocks`` is the number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWRule:
    """Update element by element."""

    is_decayed: bool
    is_embedding: bool
    """True for the embedding and the output projection, which have a rate of their own."""


Rule: TypeAlias = MuonRule | AdamWRule


_SMALL_HEADS = (
    "value_head.weight",
    "mlp.gate.weight",
    "delta.a_proj.weight",
    "delta.b_proj.weight",
    "delta.conv_weight",
)


def parameter_rule(
    name: str, shape: tuple[int, ...], config: ModelConfig, *, use_muon: bool
) -> Rule:
    """Return how the parameter ``name`` is updated.

    Muon takes every matrix but the embedding, the output projection, the router and the indexer;
    AdamW takes those and all norms and biases. A critic's value head, router, indexer and the gates of Gated DeltaNet are small
    heads whose scale matters (a sigmoid, a top-k of sums), and its convolution has a filter of its own for
    each channel, so their updates keep their relative sizes. Split:
    ``q_b_proj`` by head, ``kv_b_proj`` by head into key and value part, stacked experts by expert,
    fused gate and up projections, of experts or of a dense feed-forward, into the two.

    Source: GLM-5 (arXiv:2602.15763) section 2, Muon Split; the division of labour is GLM-4.5's.

    Args:
        name: dotted parameter name, Hugging Face convention.
        shape: of the parameter.
        config: gives the head sizes.
        use_muon: False leaves everything to AdamW.

    Raises:
        ContractError: the shape does not fit the config.
    """
    parts = name.split(".")
    is_embedding = "embed_tokens" in parts or "lm_head" in parts
    is_small_head = "indexer" in parts or name.endswith(_SMALL_HEADS)
    if not use_muon or len(shape) < 2 or is_embedding or is_small_head:
        return AdamWRule(is_decayed=len(shape) >= 2 and not is_embedding, is_embedding=is_embedding)
    rule = _muon_rule(parts, shape, config)
    num_rows = shape[-2] * (shape[0] if len(shape) == 3 else 1)
    if len(shape) > 3 or rule.num_blocks * sum(rule.rows) != num_rows:
        raise ContractError(
            f"parameter {name} has shape {tuple(shape)}, which is not {rule.num_blocks} blocks of "
            f"{rule.rows} rows as the model config says; the config belongs to another model"
        )
    return rule


def _muon_rule(parts: list[str], shape: tuple[int, ...], config: ModelConfig) -> MuonRule:
    if len(shape) == 3:
        rows = shape[1]
        is_fused = parts[-1] == "gate_up_proj"
        return MuonRule(num_blocks=shape[0], rows=(rows // 2, rows // 2) if is_fused else (rows,))
    if "gate_up_proj" in parts:
        return MuonRule(num_blocks=1, rows=(shape[0] // 2, shape[0] // 2))
    if not _has_latent_attention(config):
        return MuonRule(num_blocks=1, rows=(shape[0],))
    if "q_b_proj" in parts:
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return MuonRule(num_blocks=config.num_attention_heads, rows=(width,))
    if "kv_b_proj" in parts:
        return MuonRule(
            num_blocks=config.num_attention_heads,
            rows=(config.qk_nope_head_dim, config.v_head_dim),
        )
    return MuonRule(num_blocks=1, rows=(shape[0],))


def _has_latent_attention(config: ModelConfig) -> TypeGuard[GlmMoeDsaConfig | TransformersConfig]:
    return config.family in ("glm_moe_dsa", "glm_hybrid", "glm4_moe_lite")
