"""Every option of a stage that trains on given tokens reaches the trainer."""

from longarc.config.stages import DsaConfig, MtpAlongConfig, MtpConfig
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.pipeline import dsa, mtp
from longarc.pipeline.supervised import drafts_along
from longarc.trainer.draft_objective import DraftObjective
from longarc.trainer.supervised import SupervisedSettings

OPTIMIZER = OptimizerConfig(lr=3e-3, schedule="cosine", weight_decay=0.2, warmup_steps=2)
SHARED = {
    "num_steps": 9,
    "micro_batch_tokens": 777,
    "optimizer": OPTIMIZER,
    "int4_group_size": 16,
}


def test_the_draft_stage_hands_on_what_its_recipe_says():
    config = MtpConfig(
        **SHARED,
        router_bias_rate=0.5,
        corpus={},
        loss="single_step_tv",
        cross_entropy_steps=4,
        indexer_loss_coeff=0.25,
        indexer_stride=3,
    )
    assert mtp.settings_of(config, attention="sparse") == SupervisedSettings(
        **SHARED,
        router_bias_rate=0.5,
        mode="mtp",
        attention="sparse",
        indexer_loss_coeff=0.25,
        indexer_stride=3,
        drafts=DraftObjective(loss="single_step_tv", cross_entropy_steps=4),
    )


def test_both_phases_of_a_conversion_hand_on_what_its_recipe_says():
    activations = ActivationConfig(recomputed_layers="all")
    config = DsaConfig(
        **SHARED,
        activations=activations,
        router_bias_rate=0.5,
        warmup_steps=3,
        warmup_lr=7e-3,
        indexer_loss_coeff=0.25,
        mtp={"weight": 0.1},
    )
    rate = {"lr": 7e-3, "schedule": "constant", "weight_decay": 0.0}
    assert dsa.warmup_settings(config) == SupervisedSettings(
        **SHARED | {"num_steps": 3, "optimizer": OPTIMIZER.model_copy(update=rate)},
        activations=activations,
        router_bias_rate=0.0,
        mode="indexer_warmup",
        attention="dense",
    )
    assert dsa.sparse_settings(config) == SupervisedSettings(
        **SHARED,
        activations=activations,
        router_bias_rate=0.5,
        attention="sparse",
        indexer_loss_coeff=0.25,
        drafts=DraftObjective(loss="cross_entropy", weight=0.1, trains_trunk=True),
    )


def test_drafts_along_are_those_of_the_recipe_or_none():
    config = MtpAlongConfig(weight=0.5, loss="end_to_end_tv", trains_trunk=False)
    assert drafts_along(config) == DraftObjective(
        loss="end_to_end_tv", weight=0.5, trains_trunk=False
    )
    assert drafts_along(None) is None
