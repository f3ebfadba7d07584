"""Speculative decoding leaves the distribution as it is: chi-square tests over 100,000 tokens.

Each sampled token is turned into a number that is uniform in [0, 1) exactly if the token was drawn from the model's own
distribution after what came before it (the randomised probability integral transform); so every context counts, and a
token's depth in its round can be looked at by itself. A piece is a round where each token is due at once.
"""

import asyncio
import math

import pytest
import torch

from longarc.config.engine import EngineConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.sampler import sampling_logprobs
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from longarc.records.sampling import Sampling
from model_cases import apt_drafter

NUM_DRAFTS, NUM_NEW, NUM_BINS = 3, 200, 40
PROMPT = [5, 9, 2, 33]


def drafter():
    return apt_drafter(vocab_size=48, boldness=0.3)


async def rounds_of(num_requests, least, **sampling):
    """Return for each request its rounds of tokens."""
    config = EngineConfig(
        cache_tokens=32_768,
        max_running=100,
        num_speculative_tokens=NUM_DRAFTS,
        min_draft_probability=least,
    )

    async def one(index):
        asked = Sampling(max_new_tokens=NUM_NEW, stream_interval_tokens=1, seed=index, **sampling)
        stream = engine.stream([*PROMPT, index % 48], asked, session_id=str(index))
        return [list(piece.token_ids) async for piece in stream if piece.token_ids]

    async with EmbeddedEngine(drafter(), config, max_context_tokens=256) as engine:
        found = await asyncio.gather(*map(one, range(num_requests)))
        return found, await engine.health()


@torch.no_grad()
def uniforms_by_depth(rounds, **sampling):
    """Return two numbers for each token and its depth in its round, and how often each id came and was expected.

    The first number is made with the vocabulary in the order of ids, the second in that of the probabilities: likely
    tokens that come too often are spread over all of the first and lie at the beginning of the second.
    """
    model, generator = drafter(), torch.Generator().manual_seed(1)
    asked = Sampling(max_new_tokens=1, **sampling)
    numbers, ranked, depths = [], [], []
    counts, expected, variance = (torch.zeros(48, dtype=torch.float64) for _ in range(3))
    for index, pieces in enumerate(rounds):
        ids = torch.tensor([*PROMPT, index % 48, *[i for piece in pieces for i in piece]])
        hidden = model(ids, Layout.documents([len(ids)])).hidden[len(PROMPT) : -1]
        logits = project_logits(hidden, model.output_weight)
        p = sampling_logprobs(logits, [asked] * len(logits)).exp().double()
        sampled = ids[len(PROMPT) + 1 :, None]
        own = p.gather(1, sampled)[:, 0]
        below = p.cumsum(1).gather(1, sampled)[:, 0] - own
        better = torch.where(p > own[:, None], p, 0.0).sum(1)
        inside = own * torch.rand(len(own), generator=generator, dtype=torch.float64)
        numbers.append(below + inside)
        ranked.append(better + inside)
        depths.append(torch.cat([torch.arange(len(piece)) for piece in pieces]))
        counts += torch.bincount(sampled[:, 0], minlength=48)
        expected += p.sum(0)
        variance += (p * (1 - p)).sum(0)
    return (torch.cat(numbers), torch.cat(ranked)), torch.cat(depths), counts, expected, variance


def chi_square_p_value(statistic, degrees):
    """Return the probability of a larger chi-square statistic."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value_of_uniform(numbers):
    counts = torch.histc(numbers, NUM_BINS, 0, 1)
    expected = len(numbers) / NUM_BINS
    return chi_square_p_value(float(((counts - expected) ** 2 / expected).sum()), NUM_BINS - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_requests", "least", "sampling"),
    [
        (500, 0.0, {}),
        (250, 0.02, {}),
        (100, 0.02, {"temperature": 1.3, "top_p": 0.95}),
        (100, 0.0, {"temperature": 1.3, "top_p": 0.95}),
        (100, 0.0, {"temperature": 1.3}),
    ],
    ids=["plain", "likely drafts only", "likely drafts only, in torch", "truncated", "hot"],
)
async def test_tokens_are_distributed_as_without_drafts_at_every_depth(
    num_requests, least, sampling
):
    rounds, health = await rounds_of(num_requests, least, **sampling)
    both_numbers, depths, counts, expected, variance = uniforms_by_depth(rounds, **sampling)
    assert len(depths) == num_requests * NUM_NEW
    for numbers in both_numbers:
        assert p_value_of_uniform(numbers) > 1e-3
        for depth in range(NUM_DRAFTS + 1):
            at_depth = numbers[depths == depth]
            if least and len(at_depth) <= 200:
                continue  # likely chains are seldom so long
            assert len(at_depth) > 200
            assert p_value_of_uniform(at_depth) > 1e-3
    # How often each id came: sums of independent draws, given what came before each.
    is_likely = expected > 20
    z = (counts - expected)[is_likely] / variance[is_likely].sqrt()
    assert float(z.abs().max()) < 4.5
    # Both outcomes were common at every depth, so a wrong one would have shown.
    reached = [health.num_drafted[0], *health.num_accepted[:-1]]
    for stayed, looked_at in zip(health.num_accepted, reached, strict=True):
        assert (0.2 if least == 0 else 0.0) <= stayed / looked_at < 0.95
    assert health.num_accepted[0] > 2000


def test_the_test_would_notice_if_drafts_stayed_that_have_to_go():
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(100_000, generator=generator, dtype=torch.float64) ** 1.05
    right = torch.rand(100_000, generator=generator, dtype=torch.float64)
    assert p_value_of_uniform(wrong) < 1e-3 < p_value_of_uniform(right)
    assert chi_square_p_value(54.57, 39) == pytest.approx(0.05, abs=1e-3)
    assert math.isclose(chi_square_p_value(0.0, 5), 1.0)
