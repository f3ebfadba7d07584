"""Settings of each stage of the arc; a recipe is a sequence of these."""

import math
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from longarc.config.model import MAX_DEPTHS, AttentionPattern
from longarc.config.orchestrator import RolloutLoopConfig
from longarc.config.settings import Settings
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.records.sampling import MIN_TEMPERATURE, RoutingReplay, UpdatePolicy


def _check_warmup(optimizer: OptimizerConfig, num_steps: int) -> None:
    if optimizer.warmup_steps > num_steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is longer than the stage of {num_steps} "
            f"steps, which would never reach its rate; lower it or raise num_steps"
        )


class SupervisedConfig(Settings):
    """What pretrain, midtrain, dsa, sft and mtp share: training on given tokens."""

    num_steps: int = Field(ge=1)
    """Length of the stage [optimizer steps]."""
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward and backward [tokens]; more need more memory, results do not change."""
    activations: ActivationConfig = ActivationConfig()
    """What is kept between forward and backward; memory and time, not results."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are updated."""
    router_bias_rate: float = Field(1e-3, ge=0)
    """Step of the loss-free expert balancing; 1e-3 in DeepSeek-V3 and GLM-4.5, 0 turns it off."""
    int4_group_size: int | None = Field(None, ge=8, multiple_of=8)
    """Train the routed experts as the INT4 weights that ``longarc models convert`` then exports: so many
    numbers share a scale, 32 in public recipes; GLM-5 report, 2.4. Checkpoints hold the weights before rounding, and
    evaluations, RL and ``longarc serve`` compute with those. Experts are rounded anew in backward, which costs time
    and no second copy of them. None trains without rounding."""
    checkpoint_every_steps: int = Field(100, ge=1)
    """A crash costs at most this much work [optimizer steps]."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        _check_warmup(self.optimizer, self.num_steps)
        return self


MtpLoss: TypeAlias = Literal["cross_entropy", "single_step_tv", "end_to_end_tv"]
"""What the drafts of multi-token prediction learn from: the text, or which of them the main model accepts."""


class MtpAlongConfig(Settings):
    """Training the MTP layer along with the model; it needs ``model.num_nextn_predict_layers = 1``."""

    weight: float = Field(0.3, gt=0)
    """Factor on the drafts' loss beside the main one; GLM-4.5: 0.3 for most of its training, then 0.1."""
    loss: MtpLoss = "cross_entropy"
    """``cross_entropy`` against the text, mean over the depths; ``single_step_tv`` against the main model's own
    probabilities, each depth by itself; ``end_to_end_tv``: as many accepted in a row as possible (GLM-5.2)."""
    trains_trunk: bool = True
    """Whether the drafts' loss also reaches the model, its embedding and its output projection; False leaves the
    model bit for bit as it would be without drafts."""


class TextStageConfig(SupervisedConfig):
    """What pretrain, midtrain and dsa share: packed text."""

    tokens_per_step: int = Field(8192, ge=16)
    """Tokens in one optimizer step [tokens]."""
    mtp: MtpAlongConfig | None = None
    """Train the MTP layer along (in dsa, from the sparse phase on); None leaves it alone if there is one."""


class CorpusConfig(Settings):
    """Text of pretrain and midtrain."""

    max_bytes: int = Field(24_000_000, ge=10_000)
    """Text read from the interpreter's standard library and installed documentation [bytes]."""
    copy_share_frac: float = Field(0.3, ge=0, le=1)
    """Share of tokens from generated copy-rich text (listings, key=value, references)."""


class TaskShare(Settings):
    """How much of a stage one task family gets, and how hard its tasks are there."""

    share_frac: float = Field(1.0, gt=0)
    """Relative share; shares are normalised over the stage."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword settings for the family, over those of the recipe's ``tasks``."""


class DemonstrationsConfig(Settings):
    """Expert conversations among the text of a stage (multitask instruction pre-training, GLM-130B)."""

    tasks: dict[str, TaskShare] = Field(min_length=1)
    """Families and their shares of the conversations."""
    conversations_per_step: int = Field(16, ge=1)
    """Demonstrations in each optimizer step, beside its text [conversations]."""
    error_frac: float = Field(0.15, ge=0, le=1)
    """Share of conversations with an error and its correction; the error is context, never trained."""
    text_every_steps: int = Field(1, ge=1)
    """Steps from one that reads text to the next; between them demonstrations stand alone, so that the
    gradient of text does not drown theirs. 1 mixes both in every step."""


class PretrainConfig(TextStageConfig):
    """Causal language modelling on real text; trains the tokenizer first."""

    kind: Literal["pretrain"] = "pretrain"
    """Which stage this is."""
    context_tokens: int = Field(512, ge=16)
    """Length of one document [tokens]."""
    corpus: CorpusConfig = CorpusConfig()
    """What is read."""
    demonstrations: DemonstrationsConfig | None = None
    """Expert conversations beside the text; None for none."""
    head_from_embedding: bool = True
    """Whether the output projection starts as a copy of the embedding; both are trained apart. A copied
    token is then predicted as soon as it is attended to, which a small model learns several times sooner."""


class MidtrainConfig(TextStageConfig):
    """Longer context with a raised RoPE base; GLM-5 report, section 2.3."""

    kind: Literal["midtrain"] = "midtrain"
    """Which stage this is."""
    context_tokens: int = Field(2048, ge=16)
    """Length of one document [tokens]."""
    rope_theta: float | None = Field(None, gt=1)
    """New RoPE base; None keeps the model's."""
    pattern: AttentionPattern | None = None
    """Other attention in some layers from here on, on the weights of the stage before: sliding windows, Gated
    DeltaNet or SimpleGDN; GLM-5 report, 2.1.2. None keeps the model's."""
    corpus: CorpusConfig = CorpusConfig()
    """What is read."""
    demonstrations: DemonstrationsConfig | None = None
    """Expert conversations beside the text; None for none."""
    long_share_frac: float = Field(0.3, ge=0, le=1)
    """Share of documents that need their whole length (recall among distractors)."""


class DsaConfig(TextStageConfig):
    """Conversion to sparse attention: indexer warm-up, then sparse training; GLM-5 report, 2.1.1."""

    kind: Literal["dsa"] = "dsa"
    """Which stage this is."""
    warmup_steps: int = Field(ge=1)
    """Steps that train only the indexer against dense attention [optimizer steps]; ``num_steps`` counts
    the sparse phase after them."""
    warmup_lr: float = Field(5e-3, gt=0)
    """Learning rate of the warm-up, constant once ``optimizer.warmup_steps`` have led up to it, as they do again in
    the sparse phase; GLM-5 report, 2.1.1."""
    indexer_loss_coeff: float = Field(1.0, gt=0)
    """Weight of the indexer's KL in the sparse phase; not published."""
    index_topk_pattern: str | None = Field(None, pattern="^[FS]+$")
    """Layers that lose their indexer before the stage and reuse a selection instead: a letter for each, F
    or S, as ``longarc models share`` prints them. None leaves the model as it is."""
    context_tokens: int = Field(1024, ge=16)
    """Length of one document [tokens]."""
    corpus: CorpusConfig = CorpusConfig()
    """What is read."""
    demonstrations: DemonstrationsConfig | None = None
    """Expert conversations beside the text; None for none."""
    long_share_frac: float = Field(0.3, ge=0, le=1)
    """Share of documents that need their whole length."""

    @model_validator(mode="after")
    def _indexer_warmup_reaches_its_rate(self) -> Self:
        if self.optimizer.warmup_steps > self.warmup_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} leads up to the rate of both phases, but "
                f"the first has warmup_steps={self.warmup_steps} and would never reach warmup_lr="
                f"{self.warmup_lr}; lower optimizer.warmup_steps or raise warmup_steps"
            )
        return self


class SftConfig(SupervisedConfig):
    """Supervised fine-tuning on expert trajectories; GLM-5 report, 3.1."""

    kind: Literal["sft"] = "sft"
    """Which stage this is."""
    conversations_per_step: int = Field(32, ge=1)
    """Demonstrations in one optimizer step [conversations]; what they share at the beginning is computed
    once."""
    tasks: dict[str, TaskShare] = Field(min_length=1)
    """Families and their shares of the conversations."""
    error_frac: float = Field(0.15, ge=0, le=1)
    """Share of conversations with an error and its correction; the error is context, never trained."""
    indexer_loss_coeff: float = Field(1.0, ge=0)
    """Weight of the indexer's KL; 0 freezes the indexer."""
    indexer_stride: int = Field(1, ge=1)
    """The indexer's KL looks at every n-th query; more than 1 saves time."""
    mtp: MtpAlongConfig | None = None
    """Train the MTP layer along; None leaves it alone if there is one."""


class MtpConfig(SupervisedConfig):
    """Draft depths for a finished model: trains its MTP layer and nothing else; GLM-5 report, 2.1."""

    kind: Literal["mtp"] = "mtp"
    """Which stage this is."""
    num_depths: int | None = Field(None, ge=1, le=MAX_DEPTHS)
    """Tokens to draft one after another [tokens]; None keeps ``model.mtp_num_depths``."""
    loss: MtpLoss = "end_to_end_tv"
    """``cross_entropy`` against the text, mean over the depths; ``single_step_tv`` against the main model's own
    probabilities, each depth by itself; ``end_to_end_tv``: as many accepted in a row as possible (GLM-5.2)."""
    cross_entropy_steps: int = Field(0, ge=0)
    """Steps at the beginning that learn from cross-entropy [optimizer steps]: the TV losses are flat while hardly
    a draft is accepted."""
    start: Literal["last_layer", "random"] = "last_layer"
    """Weights of an MTP layer that the checkpoint does not have yet: those of the last decoder layer, or random
    ones. The projection that joins embedding and state is random in both."""
    indexer_loss_coeff: float = Field(1.0, ge=0)
    """Weight of the KL of the MTP layer's own indexer, where attention is sparse; 0 freezes it."""
    indexer_stride: int = Field(1, ge=1)
    """The indexer's KL looks at every n-th query; more than 1 saves time."""
    tokens_per_step: int = Field(8192, ge=16)
    """Text in one optimizer step [tokens]."""
    context_tokens: int = Field(1024, ge=16)
    """Length of one document of text [tokens]."""
    corpus: CorpusConfig | None = None
    """What is read; ``{}`` for the corpus of pretrain with its defaults, None for demonstrations alone."""
    long_share_frac: float = Field(0.0, ge=0, le=1)
    """Share of documents of text that need their whole length."""
    demonstrations: DemonstrationsConfig | None = None
    """Expert conversations, beside the text or alone; None for text alone."""

    @model_validator(mode="after")
    def _has_something_to_read(self) -> Self:
        if self.corpus is None and self.demonstrations is None:
            raise ValueError(
                "corpus and demonstrations are both missing, so there is nothing to train on; set "
                "corpus = {} for text, or demonstrations"
            )
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.activations != ActivationConfig():
            raise ValueError(
                "activations are those of the decoder layers, which an mtp stage only reads: nothing of "
                "them is kept. Leave activations out"
            )
        if self.cross_entropy_steps and self.loss == "cross_entropy":
            raise ValueError(
                f"cross_entropy_steps={self.cross_entropy_steps} says what comes before the TV losses, but "
                f'loss is "cross_entropy" throughout. Leave it out, or choose another loss'
            )
        if self.cross_entropy_steps >= self.num_steps:
            raise ValueError(
                f"cross_entropy_steps={self.cross_entropy_steps} leaves none of num_steps="
                f'{self.num_steps} to {self.loss}; lower it, or set loss = "cross_entropy"'
            )
        return self


class LossConfig(Settings):
    """The policy-gradient objective."""

    path: str = "longarc.algos.losses:icepop"
    """Import path of a PolicyLoss: your own, or one of ``longarc.algos.losses``, as ``:icepop``, ``:double_sided``,
    ``:ppo_clip``, ``:behaviour_ppo``, ``:cispo``, ``:gspo``, ``:opsm``, ``:truncated``, ``:masked``,
    ``:masked_by_sequence`` and ``:masked_by_geometric_mean``. A small batch is tried with it before a run starts."""
    settings: dict[str, float] = Field(default_factory=dict)
    """Keyword settings of the loss (bounds, clips)."""
    reduction: Literal["token_mean", "sequence_mean", "segment_mean", "group_mean"] = "token_mean"
    """token_mean: one mean over the step's tokens (GLM-5 eq. 3); sequence_mean: a mean per trajectory (eq. 1);
    segment_mean: a mean per segment, so that compacted trajectories count several times; group_mean: one per group
    (DAPO as printed)."""


class OverlongConfig(Settings):
    """A reward that falls before a length limit is reached: soft overlong punishment, DAPO (arXiv:2503.14476)."""

    max_tokens: int = Field(ge=1)
    """Trained tokens of a rollout from which on it loses 1 of its reward [tokens]."""
    cache_tokens: int = Field(ge=1)
    """Tokens before that over which the loss grows from 0 to 1 [tokens]."""

    @model_validator(mode="after")
    def _interval_exists(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} begin before the first of max_tokens={self.max_tokens}; lower "
                f"cache_tokens to at most max_tokens"
            )
        return self


class RolloutConfig(Settings):
    """How the policy is sampled in an RL or evaluation stage."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; training scores under the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that reach this share; training scores among the same tokens, which are recorded."""
    top_k: int = Field(0, ge=0)
    """Draw from so many of the likeliest tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Draw from tokens with at least this share of the likeliest one's probability; 0 keeps all."""
    max_new_tokens: int = Field(96, ge=1)
    """Budget of one turn [tokens]."""
    max_context_tokens: int = Field(1024, ge=16)
    """Budget of a whole rollout, prompts and observations included [tokens]."""
    on_update: UpdatePolicy | None = None
    """A turn that is being sampled when new weights arrive goes on under them with its old cache (``continue``), computes
    its cache again before it goes on (``recompute``), or ends under the old weights, for which the engine keeps a second copy
    and further updates wait (``finish``). None leaves it to the engine: the embedded one continues."""
    routing_replay: RoutingReplay = "none"
    """What of the engine's routing training computes with, in place of its own choices (rollout routing replay, R3):
    ``experts`` of each token, or ``experts_and_keys``, also what its indexers selected. The engine then keeps them beside
    the rows of its cache and they are recorded with the tokens. LongArc's engine and trainer choose alike for the same
    weights, so this is for weights that differ: rollouts in FP8, or turns that an update caught. For glm_moe_dsa."""

    @field_validator("temperature")
    @classmethod
    def _is_sampled_with(cls, temperature: float) -> float:
        if temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf:
            return temperature
        raise ValueError(f"is 0, or at least {MIN_TEMPERATURE} and finite")


Advantage: TypeAlias = Literal[
    "std",
    "mean",
    "leave_one_out",
    "running_mean",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]
"""What the rewards of a step are compared with."""

GROUP_BASELINES: Final = ("std", "mean", "leave_one_out", "reinforce_plus_plus_baseline")
"""Those that make nothing of a group of one."""


class RlConfig(Settings):
    """Reinforcement learning on verifiable tasks."""

    kind: Literal["reasoning_rl", "agentic_rl", "general_rl"]
    """Which stage this is: the three differ in tasks, loss and asynchrony, which are all settings."""
    tasks: dict[str, TaskShare] = Field(min_length=1)
    """Families and their shares of the groups."""
    loop: RolloutLoopConfig
    """How rollouts are scheduled against training steps."""
    rollout: RolloutConfig = RolloutConfig()
    """How the policy is sampled."""
    loss: LossConfig = LossConfig()
    """The objective."""
    advantage: Advantage = "std"
    """What rewards are compared with. A group: ``std`` is (R - mean) / std (GRPO), ``mean`` R - mean (GLM-4.5),
    ``leave_one_out`` R - the mean of the others (RLOO). ``running_mean``: what the family's rollouts earned lately.
    ``reinforce_plus_plus``: R, normalised over the tokens of the step; ``reinforce_plus_plus_baseline``: R - the
    group's mean, normalised likewise. Without a group (``loop.group_size = 1``) only ``running_mean`` and
    ``reinforce_plus_plus`` have something to compare with."""
    running_mean_window: int | None = Field(None, ge=1)
    """Rewards of each family that ``running_mean`` remembers [rollouts]; None is 128. For that advantage alone."""
    overlong: OverlongConfig | None = None
    """What long rollouts lose of their reward; None for nothing. Dynamic sampling looks at rewards before it."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-4, weight_decay=0.0)
    """How weights are updated."""
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward and backward [tokens]."""
    activations: ActivationConfig = ActivationConfig()
    """What is kept between forward and backward; memory and time, not results."""
    router_bias_rate: float = Field(0.0, ge=0)
    """Step of the loss-free expert balancing; 0 in RL."""
    trainer_process: bool = False
    """Whether the trainer runs in a process of its own, so that sampling and training overlap."""
    checkpoint_every_steps: int = Field(20, ge=1)
    """A crash costs at most this many recomputed steps [optimizer steps]."""

    @model_validator(mode="after")
    def _can_learn(self) -> Self:
        _check_samples(self.rollout)
        _check_warmup(self.optimizer, self.loop.num_steps)
        if self.loop.group_size == 1 and self.advantage in GROUP_BASELINES:
            raise ValueError(
                f'loop.group_size=1 leaves nothing to compare with: advantage="{self.advantage}" is a group '
                f"baseline and makes every advantage 0. Raise loop.group_size to at least 2, or set advantage to "
                f'"running_mean" or "reinforce_plus_plus".'
            )
        is_alone = self.loop.group_size * self.loop.groups_per_step == 1
        if is_alone and self.advantage == "reinforce_plus_plus":
            raise ValueError(
                f'advantage="{self.advantage}" compares the rollouts of a step, of which there is one: loop.group_size '
                f"* loop.groups_per_step is 1. Raise loop.groups_per_step."
            )
        if self.running_mean_window is not None and self.advantage != "running_mean":
            raise ValueError(
                f'running_mean_window={self.running_mean_window} has no effect with advantage="{self.advantage}"; '
                f'leave it out, or set advantage="running_mean"'
            )
        return self

    @model_validator(mode="after")
    def _length_can_matter(self) -> Self:
        if self.overlong is None:
            return self
        longest, first = (
            self.rollout.max_context_tokens,
            self.overlong.max_tokens - self.overlong.cache_tokens,
        )
        if first >= longest:
            raise ValueError(
                f"overlong punishes rollouts of more than max_tokens - cache_tokens = {first} tokens, which "
                f"rollout.max_context_tokens={longest} never lets through; lower overlong.max_tokens, or leave "
                f"overlong out"
            )
        return self


class DistillConfig(Settings):
    """On-policy cross-stage distillation; GLM-5 report, section 3.5, eq. 2."""

    kind: Literal["distill"] = "distill"
    """Which stage this is."""
    tasks: dict[str, TaskShare] = Field(min_length=1)
    """Families and their shares of the prompts."""
    teachers: dict[str, str]
    """For each family the earlier stage whose final checkpoint teaches it; ``initial`` is what the recipe
    starts from."""
    loop: RolloutLoopConfig
    """How rollouts are scheduled against training steps; group_size 1 samples each prompt once."""
    rollout: RolloutConfig = RolloutConfig()
    """How the student is sampled; teachers score at the same temperature."""
    loss: LossConfig = LossConfig()
    """The objective that carries the distillation advantage."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-4, weight_decay=0.0)
    """How weights are updated."""
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward and backward [tokens]."""
    activations: ActivationConfig = ActivationConfig()
    """What is kept between forward and backward; memory and time, not results."""
    trainer_process: bool = False
    """Whether the trainer runs in a process of its own."""
    checkpoint_every_steps: int = Field(20, ge=1)
    """A crash costs at most this many recomputed steps [optimizer steps]."""

    @model_validator(mode="after")
    def _each_family_has_a_teacher(self) -> Self:
        missing = sorted(set(self.tasks) - set(self.teachers))
        if missing:
            raise ValueError(
                f"families without a teacher: {missing}; name one of the earlier stages for each in [teachers]"
            )
        idle = sorted(set(self.teachers) - set(self.tasks))
        if idle:
            raise ValueError(
                f"teachers of families that the stage does not have: {idle}; its tasks are "
                f"{sorted(self.tasks)}"
            )
        return self

    @model_validator(mode="after")
    def _can_learn(self) -> Self:
        _check_samples(self.rollout)
        _check_warmup(self.optimizer, self.loop.num_steps)
        if self.loop.dynamic_sampling:
            raise ValueError(
                "loop.dynamic_sampling=True would drop groups by their rewards, which distillation "
                "does not learn from. Set loop.dynamic_sampling=false."
            )
        if self.loop.min_mean_reward is not None or self.loop.max_mean_reward is not None:
            raise ValueError(
                f"loop.min_mean_reward={self.loop.min_mean_reward}, loop.max_mean_reward={self.loop.max_mean_reward} "
                f"would drop groups by their rewards, which distillation does not learn from. Leave them out."
            )
        return self


class EvalConfig(Settings):
    """The evaluation matrix: stages by families, sampled with the real tools."""

    kind: Literal["eval"] = "eval"
    """Which stage this is."""
    stages: list[str] = Field(min_length=1)
    """Stages whose final checkpoints are evaluated; ``initial`` is what the recipe starts from."""
    tasks: dict[str, TaskShare] = Field(min_length=1)
    """Families; shares are ignored."""
    tasks_per_family: int = Field(64, ge=1)
    """Held-out tasks per family and checkpoint [tasks]."""
    tasks_per_family_full: int = Field(1000, ge=1)
    """The same for ``longarc eval --full`` [tasks]."""
    max_concurrent_rollouts: int = Field(64, ge=1)
    """Rollouts in flight."""
    rollout_timeout_s: float = Field(300.0, gt=0)
    """Wall-clock budget of one rollout [seconds]."""
    rollout: RolloutConfig = RolloutConfig()
    """How the policy is sampled: the training temperature."""

    @model_validator(mode="after")
    def _weights_stay(self) -> Self:
        if self.rollout.routing_replay != "none":
            raise ValueError(
                f"rollout.routing_replay={self.rollout.routing_replay!r} has no effect in an evaluation, which trains "
                f"nothing; leave it out"
            )
        if self.rollout.on_update is not None:
            raise ValueError(
                f"rollout.on_update={self.rollout.on_update!r} has no effect in an evaluation, whose weights never "
                f"change; leave it out"
            )
        return self


def takes_turns(stage: RlConfig | DistillConfig) -> bool:
    """Say whether the engine rests while the trainer trains, so that each in turn may have all cores."""
    return not stage.trainer_process and stage.loop.max_lag_steps == 0


def _check_samples(rollout: RolloutConfig) -> None:
    if rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature=0 always takes the likeliest token: there is nothing to compare, and "
            "the policy's distribution has no gradient. Use a temperature above 0; 1 is usual."
        )


StageConfig: TypeAlias = Annotated[
    PretrainConfig
    | MidtrainConfig
    | DsaConfig
    | SftConfig
    | MtpConfig
    | RlConfig
    | DistillConfig
    | EvalConfig,
    Field(discriminator="kind"),
]
"""Any stage."""
