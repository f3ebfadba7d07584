"""A model that one of transformers' own classes computes: which class, and the settings that it reads."""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    FiniteFloat,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from longarc.config.settings import Settings, problems_of, read_strictly

TransformersFamily: TypeAlias = Literal["glm", "glm4", "glm4_moe", "glm4_moe_lite"]
"""As ``model_type`` in ``config.json`` spells it."""

CLASSES: Final[Mapping[str, str]] = {
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}
"""The class of each family."""
MIXTURES: Final = ("glm4_moe", "glm4_moe_lite")
"""Families with routed experts."""
ROPE_TYPES: Final = ("default", "linear", "yarn", "llama3")
"""Rotary embeddings in which an angle depends on its position alone. In the others it depends on the longest
sequence of a pass as well, so a trainer and an engine would compute different numbers for one token."""

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_MIXTURE_SIZES: Final = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
_GROUPED_SIZES: Final = ("num_key_value_heads",)
_LATENT_SIZES: Final = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NOT_SETTINGS: Final = ("model_type", "architectures", "quantization_config", "dtype")


class _Rope(BaseModel):
    """Numbers of ``rope_parameters``, as far as they are there."""

    rope_theta: FiniteFloat | None = None
    factor: FiniteFloat | None = None
    partial_rotary_factor: FiniteFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None


class _Numbers(BaseModel):
    """Numbers and flags that transformers' classes read, as far as they are there; whose values they take as they come."""

    intermediate_size: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    n_shared_experts: NonNegativeInt | None = None
    first_k_dense_replace: NonNegativeInt | None = None
    n_group: PositiveInt | None = None
    topk_group: PositiveInt | None = None
    rms_norm_eps: NonNegativeFloat | None = None
    initializer_range: NonNegativeFloat | None = None
    routed_scaling_factor: FiniteFloat | None = None
    attention_dropout: NonNegativeFloat | None = None
    partial_rotary_factor: FiniteFloat | None = None
    rope_theta: FiniteFloat | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    attention_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    norm_topk_prob: bool | None = None
    use_qk_norm: bool | None = None


def model_key(model: Settings, name: str) -> str:
    """Return where a recipe says ``name`` of a model: transformers' own settings have a table of their own."""
    table = "model.hf_config" if isinstance(model, TransformersConfig) else "model"
    return f"{table}.{name}"


class TransformersConfig(Settings):
    """GLM-4 to GLM-4.7 as transformers builds them; needs the extra ``hf``.

    Most such models come from a directory (``initial.path``), whose ``config.json`` becomes this. Attention and
    routed experts are computed by LongArc, everything else by transformers' code.
    """

    family: TransformersFamily
    """Which class: ``glm`` GLM-4-9B-chat-hf, ``glm4`` GLM-4-0414 and Z1, ``glm4_moe`` GLM-4.5 to 4.7,
    ``glm4_moe_lite`` GLM-4.7-Flash."""
    hf_config: dict[str, JsonValue]
    """Content of ``config.json`` under its own names, without ``model_type``, ``architectures`` and ``dtype``.
    The sizes have to be there; what else is left out has transformers' default."""
    carries_mtp: bool = False
    """Whether the checkpoint's layer for multi-token prediction is held and written again, as it came: nothing
    computes with it or trains it. A directory that has one sets this."""

    @model_validator(mode="after")
    def _says_what_is_built(self) -> Self:
        for name in _NOT_SETTINGS:
            if self.hf_config.get(name) is not None:
                raise ValueError(
                    f"hf_config.{name}={self.hf_config[name]!r} is not read; leave it out: the class follows from "
                    f"family={self.family!r}, and weights are fp32 while they are trained"
                )
        for name in self._size_names():
            value = self.hf_config.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"hf_config.{name}={value!r} has to be a whole number of at least 1 for family="
                    f"{self.family!r}; copy it from the model's config.json"
                )
        if self.carries_mtp and not self.has_experts:
            raise ValueError(
                f"carries_mtp=True, but {self.family} checkpoints have no MTP layer; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        heads, key_heads = self.num_attention_heads, self.hf_config.get("num_key_value_heads")
        if self.family != "glm4_moe_lite" and heads % self._size("num_key_value_heads"):
            raise ValueError(
                f"hf_config.num_attention_heads={heads} is not a multiple of num_key_value_heads={key_heads}"
            )
        if self.has_experts:
            experts, groups = self.n_routed_experts, self.hf_config.get("n_group", 1)
            if self._size("num_experts_per_tok") > experts:
                raise ValueError(
                    f"hf_config.num_experts_per_tok={self._size('num_experts_per_tok')} exceeds "
                    f"n_routed_experts={experts}"
                )
            # The router compares the two best of each group.
            if (
                not isinstance(groups, int)
                or groups < 1
                or experts % groups
                or experts < 2 * groups
            ):
                raise ValueError(
                    f"hf_config.n_group={groups!r} does not divide n_routed_experts={experts} into groups of at "
                    f"least 2; 1 makes no groups"
                )
        return self

    @model_validator(mode="after")
    def _computes_what_it_says(self) -> Self:
        dropout = self.hf_config.get("attention_dropout")
        if dropout:
            raise ValueError(
                f"hf_config.attention_dropout={dropout!r} is not supported: engine and trainer have to compute "
                f"the same numbers; set it to 0.0"
            )
        act = self.hf_config.get("hidden_act", "silu")
        if act != "silu":
            raise ValueError(f"hf_config.hidden_act={act!r} is not supported; supported: 'silu'")
        rope_type = self._rope().get("rope_type", self._rope().get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"hf_config: rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}, whose "
                f"angles depend on the position alone"
            )
        return self

    @model_validator(mode="after")
    def _numbers_are_numbers(self) -> Self:
        try:
            read_strictly(_Numbers, self.hf_config)
        except ValidationError as error:
            raise ValueError(
                f"hf_config.{problems_of(error).replace('; ', '; hf_config.')}; copy it from the model's config.json"
            ) from error
        return self

    @property
    def has_experts(self) -> bool:
        """Whether there are routed experts."""
        return self.family in MIXTURES

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding [tokens]."""
        return self._size("vocab_size")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._size("hidden_size")

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers, without one for multi-token prediction."""
        return self._size("num_hidden_layers")

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self._size("num_attention_heads")

    @property
    def n_routed_experts(self) -> int:
        """Experts a token can be routed to; 0 without a mixture."""
        return self._size("n_routed_experts") if self.has_experts else 0

    @property
    def qk_nope_head_dim(self) -> int:
        """Query and key width per head without rotation; of ``glm4_moe_lite`` alone."""
        return self._size("qk_nope_head_dim")

    @property
    def qk_rope_head_dim(self) -> int:
        """Query and key width per head with rotation; of ``glm4_moe_lite`` alone."""
        return self._size("qk_rope_head_dim")

    @property
    def v_head_dim(self) -> int:
        """Value width per head; of ``glm4_moe_lite`` alone."""
        return self._size("v_head_dim")

    @property
    def max_position_embeddings(self) -> int:
        """Longest context [tokens]: the stated one, or where YaRN stretches the original one beyond it."""
        stated = self._size("max_position_embeddings")
        rope = self._rope()
        factor = rope.get("factor")
        if rope.get("rope_type", rope.get("type")) != "yarn" or not isinstance(factor, int | float):
            return stated
        original = rope.get("original_max_position_embeddings", stated)
        return max(stated, int(factor * original)) if isinstance(original, int) else stated

    @property
    def initializer_range(self) -> float:
        """Standard deviation of the initial weights."""
        value = self.hf_config.get("initializer_range", 0.02)
        return float(value) if isinstance(value, int | float) else 0.02

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        value = self._rope().get("rope_theta", self.hf_config.get("rope_theta"))
        return float(value) if isinstance(value, int | float) else 1e4

    def with_rope_theta(self, rope_theta: float) -> "TransformersConfig":
        """Return the same settings with another base of the rotary frequencies."""
        others = {
            k: v for k, v in self.hf_config.items() if k not in ("rope_theta", "rope_scaling")
        }
        rope = {"rope_type": "default", **self._rope(), "rope_theta": rope_theta}
        return self.model_copy(update={"hf_config": {**others, "rope_parameters": rope}})

    def _rope(self) -> Mapping[str, Any]:
        rope = self.hf_config.get("rope_parameters") or self.hf_config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ValueError(  # noqa: TRY004 - what a validator raises
                f"hf_config.rope_parameters={rope!r} is no object; write it as in "
                f'{{"rope_type": "default", "rope_theta": 10000.0}}'
            )
        return rope

    def _size_names(self) -> tuple[str, ...]:
        names = _SIZES + (_MIXTURE_SIZES if self.has_experts else ())
        return names + (_LATENT_SIZES if self.family == "glm4_moe_lite" else _GROUPED_SIZES)

    def _size(self, name: str) -> int:
        value = self.hf_config[name]
        assert isinstance(value, int)
        return value
