"""Search for the layers of a model that can do with a sliding window.

::

    FFFF --convert 1 layer--> SFFF FSFF FFSF FFFS --score, keep the best `beam`--> FSFF FFFS
                              --convert 1 layer--> SSFF FSSF FSFS SFFS FFSS       --score ...

Source: GLM-5, arXiv:2602.15763, section 2.1.2: beam 8, two layers a step, scored by RULER at one context length;
the pattern found there served all lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from longarc.errors import ContractError

PatternScorer: TypeAlias = Callable[[str], float]
"""How good a model with this pattern is; a larger number is better."""


@dataclass(frozen=True, slots=True)
class ScoredPattern:
    """A pattern and what it was found to be worth."""

    layers: str
    """A letter a layer."""
    score: float


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What one step of the search left."""

    num_scored: int
    """Patterns that were scored."""
    kept: tuple[ScoredPattern, ...]
    """The best of them, best first."""


def beam_search(
    num_layers: int,
    score: PatternScorer,
    *,
    num_converted: int,
    beam: int,
    layers_per_step: int = 1,
    full: str = "F",
    converted: str = "S",
    max_candidates: int | None = None,
) -> list[SearchStep]:
    """Convert layers step by step, and keep the patterns that score best.

    Each pattern is scored once. Equal scores keep the pattern that converts earlier layers first, so the
    result depends on the scores alone.

    Args:
        num_layers: of the model; the search starts where all of them are ``full``.
        score: of a pattern, a letter a layer.
        num_converted: layers that the patterns of the last step have converted.
        beam: patterns that a step leaves.
        layers_per_step: layers converted in one step; the last one converts what is left.
        full: letter of a layer that is not converted.
        converted: letter of one that is.
        max_candidates: patterns scored in one step at most, spread evenly over all there are; None scores
            all, which with two layers a step can be hundreds for each pattern kept.

    Returns:
        The steps; ``steps[-1].kept[0]`` is the result.

    Raises:
        ContractError: a number is out of range, or a score is not a number.
    """
    for name, value, high in (
        ("num_converted", num_converted, num_layers),
        ("beam", beam, None),
        ("layers_per_step", layers_per_step, num_layers),
        ("max_candidates", 1 if max_candidates is None else max_candidates, None),
    ):
        if value < 1 or (high is not None and value > high):
            allowed = "at least 1" if high is None else f"1 to {high}"
            raise ContractError(f"{name}={value} is out of range; choose {allowed}")
    steps: list[SearchStep] = []
    kept: Sequence[str] = (full * num_layers,)
    left = num_converted
    while left:
        count = min(layers_per_step, left)
        candidates = _candidates(kept, count, full=full, converted=converted)
        candidates = _spread(candidates, max_candidates)
        scored = [ScoredPattern(layers, _checked(score(layers), layers)) for layers in candidates]
        best = sorted(scored, key=lambda pattern: -pattern.score)[:beam]
        steps.append(SearchStep(len(scored), tuple(best)))
        kept = [pattern.layers for pattern in best]
        left -= count
    return steps


def _candidates(kept: Sequence[str], count: int, *, full: str, converted: str) -> list[str]:
    """Return every pattern with ``count`` more layers converted, once, those with earlier layers first."""
    found: set[tuple[int, ...]] = set()
    for pattern in kept:
        done = [layer for layer, letter in enumerate(pattern) if letter == converted]
        open_layers = [layer for layer, letter in enumerate(pattern) if letter == full]
        found.update(tuple(sorted((*done, *more))) for more in combinations(open_layers, count))
    num_layers = len(kept[0])
    return [
        "".join(converted if layer in layers else full for layer in range(num_layers))
        for layers in sorted(found)
    ]


def _spread(candidates: list[str], limit: int | None) -> list[str]:
    if limit is None or len(candidates) <= limit:
        return candidates
    return [candidates[i * len(candidates) // limit] for i in range(limit)]


def _checked(score: float, layers: str) -> float:
    if score != score:
        raise ContractError(
            f"the score of {layers} is not a number; a scorer returns a finite score for every pattern"
        )
    return score
