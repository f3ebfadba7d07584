"""Stage ``pretrain``: a tokenizer from text, then a model from random weights."""

from dataclasses import replace

import torch

from longarc.config.model import ModelConfig
from longarc.config.stages import PretrainConfig
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.pipeline.demonstrations import text_and_demonstrations
from longarc.pipeline.supervised import base_settings, drafts_along, train_supervised
from longarc.pipeline.text import corpus_texts
from longarc.pipeline.workspace import Workspace
from longarc.tokens.tokenizer import Tokenizer


async def run(workspace: Workspace, stage: str, config: PretrainConfig) -> None:
    """Train the tokenizer where the recipe brings none, then next-token prediction, densely."""
    seed = workspace.recipe.seed
    if workspace.recipe.tokenizer.path is None and not workspace.tokenizer_path.exists():
        train_tokenizer(workspace, config)
    await train_supervised(
        workspace,
        stage=stage,
        config=config,
        settings=replace(
            base_settings(config),
            attention="dense",
            drafts=drafts_along(config.mtp),
        ),
        model=initial_model(
            workspace.recipe.model, seed=seed, head_from_embedding=config.head_from_embedding
        ),
        policy_version=0,
        documents=text_and_demonstrations(workspace, stage, config, seed=seed),
    )


def initial_model(config: ModelConfig, *, seed: int, head_from_embedding: bool) -> Decoder:
    """Build the model and draw its weights."""
    model = build_model(config, seed=seed)
    if head_from_embedding:
        with torch.no_grad():
            model.output_weight.copy_(model.model.embed_tokens.weight)
    return model


def train_tokenizer(workspace: Workspace, config: PretrainConfig) -> None:
    """Train the byte-level BPE on the beginning of the stage's own text."""
    settings = workspace.recipe.tokenizer
    texts = corpus_texts(config.corpus, seed=workspace.recipe.seed)
    sample: list[str] = []
    num_bytes = 0
    while num_bytes < settings.training_bytes:
        sample.append(texts.text(len(sample)))
        num_bytes += len(sample[-1].encode())
    Tokenizer.train(sample, vocab_size=settings.vocab_size).save(workspace.tokenizer_path)
