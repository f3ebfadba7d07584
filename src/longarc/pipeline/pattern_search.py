"""Search of a checkpoint for the layers that can do with a window: a beam of patterns, scored without training.

A scorer is any callable ``(model, tokenizer, **settings) -> float``, named by import path; larger is better.
Scores are kept in a file as they come, so that a search that was stopped, or is asked for more, repeats none.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from longarc.algos.pattern_search import SearchStep, beam_search
from longarc.config.load_object import load_object
from longarc.config.model import AttentionPattern
from longarc.config.settings import Settings
from longarc.errors import ConfigError, boundary
from longarc.models.conversion import to_hybrid
from longarc.models.decoder_base import Decoder
from longarc.runs.files import json_document, write_atomically
from longarc.tokens.tokenizer import Tokenizer


class PatternSearchConfig(Settings):
    """How to search; GLM-5 report, 2.1.2: beam 8, two layers a step, 20 of 40 layers."""

    num_converted: int = Field(ge=1)
    """Layers that get a window in the end."""
    window: int = Field(256, ge=1)
    """Keys that a query of those layers sees [tokens]."""
    beam: int = Field(8, ge=1)
    """Patterns that a step leaves."""
    layers_per_step: int = Field(1, ge=1)
    """Layers converted in one step."""
    max_candidates: int | None = Field(None, ge=1)
    """Patterns scored in one step at most, spread evenly over all there are; None scores all."""
    scorer: str = "longarc.pipeline.needles:needle_score"
    """Import path of a callable (model, tokenizer, **scorer_settings) that returns a number."""
    scorer_settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords for the scorer."""


def search_pattern(
    model: Decoder,
    tokenizer: Tokenizer,
    config: PatternSearchConfig,
    *,
    memo: Path | None = None,
    weights_digest: str = "",
) -> list[SearchStep]:
    """Search from a model in which every layer attends to everything.

    Args:
        model: its weights are used as they are.
        tokenizer: of the model.
        config: how to search.
        memo: file with the scores that are known; is read and written.
        weights_digest: names the weights in that file; scores of others are not used.

    Raises:
        ConfigError: the scorer cannot be loaded or fails, or the memo is no file of scores.
        ContractError: a number is out of range for this model, or a score is not a number.
    """
    scorer: Callable[..., float] = load_object(config.scorer, kind=Callable)  # type: ignore[arg-type]
    known = _Memo(memo, _key(config, weights_digest))

    def score(layers: str) -> float:
        found = known.get(layers)
        if found is None:
            pattern = AttentionPattern(layers=layers, window=config.window)
            with boundary(ConfigError, f"scorer {config.scorer} failed for {layers}"):
                found = float(
                    scorer(to_hybrid(model, pattern), tokenizer, **config.scorer_settings)
                )
            known.put(layers, found)
        return found

    return beam_search(
        model.config.num_hidden_layers,
        score,
        num_converted=config.num_converted,
        beam=config.beam,
        layers_per_step=config.layers_per_step,
        max_candidates=config.max_candidates,
    )


class _Memo:
    """Scores by pattern, in a JSON file that may hold those of other searches too."""

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key
        self._all: dict[str, dict[str, float]] = {}
        if path is not None and path.exists():
            with boundary(
                ConfigError, f"cannot read the scores in {path}; remove it to start anew"
            ):
                content: Mapping[str, Mapping[str, float]] = orjson.loads(path.read_bytes())
                self._all = {name: dict(scores) for name, scores in content.items()}

    def get(self, layers: str) -> float | None:
        """Return a known score."""
        return self._all.get(self._key, {}).get(layers)

    def put(self, layers: str, score: float) -> None:
        """Keep a score."""
        self._all.setdefault(self._key, {})[layers] = score
        if self._path is not None:
            write_atomically(self._path, json_document(self._all))


def _key(config: PatternSearchConfig, weights_digest: str) -> str:
    """Name what a score depends on: weights, window, scorer."""
    what = [weights_digest, config.window, config.scorer, config.scorer_settings]
    return hashlib.sha256(orjson.dumps(what, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
