"""Speculative decoding: the model's MTP layer drafts, the model verifies, rejection sampling keeps its distribution.

::

    newest token --draft--> k tokens --one pass of the model over all k + 1--> those that stay, and one more

How many tokens a request drafts in a round depends on its budget and on what it drafts, and its numbers are a function of
its seed and the position; so its tokens do not depend on company. A draft that would make its chain too unlikely is not
made: as a draft it has no probability, and the token at its place is drawn from what is left of the model's distribution,
``max(p - q, 0)`` with that q. That is rejection sampling still and changes no distribution. What is drafted depends on
where rounds begin, so whatever is to be sampled begins with a round: of a prompt, or of a completion that is interrupted,
all but the newest token is computed beforehand.

Source: the algorithm, ``longarc.algos.speculative``; drafts, GLM-5 (arXiv:2602.15763), section 2.1.
Shape letters: B requests, D drafts, T = D + 1, N rows of all requests, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.algos.speculative import inverse_cdf, verified
from longarc.config.engine import EngineConfig
from longarc.engine.decoding import Advance, Decoding
from longarc.engine.request import Request
from longarc.engine.sampler import (
    Stream,
    is_plain,
    kept_of,
    raw_logprobs,
    sampling_logprobs,
    sampling_probability,
    uniforms,
)
from longarc.engine.weights import EngineWeights
from longarc.errors import ConfigError, ContractError
from longarc.models.cache import PagedCache, RowRounding
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Attention, Decoder
from longarc.models.drafting import Drafter, drafter_of
from longarc.models.kernels.drafts import DraftingGlmMoeDsa, RoundDraws
from longarc.models.kernels.steps import Interrupt
from longarc.models.projection import token_logprobs
from longarc.models.variants.hybrid import Hybrid
from longarc.records.sampling import Sampling
from longarc.tokens.grammar import AllowedIds


def checked_to_draft(model: Decoder, num_speculative_tokens: int) -> GlmMoeDsa:
    """Return the model if it can draft.

    Raises:
        ConfigError: it has no MTP layer, or layers that cannot take back what they have seen.
    """
    asked = f"engine.num_speculative_tokens={num_speculative_tokens}"
    if isinstance(model, Hybrid):
        raise ConfigError(
            f"{asked}: a {model.config.family} model cannot draft while it samples, because what its layers "
            f"remember cannot be taken back where a draft is refused; leave it at 0"
        )
    if not isinstance(model, GlmMoeDsa) or model.mtp is None:
        raise ConfigError(
            f"{asked}: this {model.config.family} model has no MTP layer to draft with "
            f"(model.num_nextn_predict_layers=0); leave it at 0, or give the model one with an mtp stage"
        )
    return model


class Speculation(Decoding):
    """Some tokens of each request in a step."""

    keeps_newest_token = True

    def __init__(self, *, attention: Attention, num_drafts: int, least_probability: float) -> None:
        """Draft from the caches of ``cache_for``.

        Args:
            attention: how the models were trained to attend.
            num_drafts: most tokens to draft in a round.
            least_probability: no draft is made that the MTP layer gives its chain less than this.
        """
        super().__init__(attention=attention)
        self.max_step_tokens = num_drafts + 1
        self._num_drafts = num_drafts
        self._least = least_probability
        self.num_drafted = [0] * num_drafts
        self.num_accepted = [0] * num_drafts

    def prefill(
        self,
        weights: EngineWeights,
        token_ids: Int[Tensor, " new"],
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Float[Tensor, "B hidden"]:
        """Compute known tokens and what is drafted from; return the state of each sequence's last one."""
        hidden = weights.model.extend(
            token_ids, slots, starts, counts, weights.cache, attention=self._attention
        )
        _drafter(weights).take(token_ids, hidden, slots, starts, counts)
        return hidden[torch.tensor(counts).cumsum(0) - 1]

    def decode(
        self,
        weights: EngineWeights,
        requests: Sequence[Request],
        *,
        max_steps: int,
        interrupt: Interrupt,
    ) -> list[Advance]:
        """Draft behind each request's last token, verify, and so on, for one round or up to ``max_steps``."""
        advances: dict[int, Advance] = {}
        is_native = isinstance(weights.cache, DraftingGlmMoeDsa)
        plain = [r for r in requests if is_native and is_plain([r.sampling])]
        others = [r for r in requests if r not in plain]
        # Each request goes the way of its own sampling, whatever the others ask for.
        if others:
            advances |= zip(map(id, others), self._round(weights, others), strict=True)
        if plain:
            max_rounds = 1 if others else max_steps
            found = self._native_rounds(weights, plain, max_rounds, interrupt)
            advances |= zip(map(id, plain), found, strict=True)
        return [advances[id(request)] for request in requests]

    def _native_rounds(
        self,
        weights: EngineWeights,
        requests: Sequence[Request],
        max_rounds: int,
        interrupt: Interrupt,
    ) -> list[Advance]:
        assert isinstance(weights.cache, DraftingGlmMoeDsa)
        seats = [request.used_seat() for request in requests]
        samplings = [request.sampling for request in requests]
        found = weights.cache.rounds(
            [request.last_token for request in requests],
            [seat.index for seat in seats],
            [seat.length for seat in seats],
            RoundDraws(
                max_rounds=max_rounds,
                num_drafts=self._num_drafts,
                least_probability=self._least,
                temperatures=[s.temperature for s in samplings],
                seeds=[request.seed for request in requests],
                num_drawn=[request.draw_position for request in requests],
                budgets=[request.num_left for request in requests],
                due=[request.num_until_handover for request in requests],
                stop_ids=[s.stop_ids for s in samplings],
            ),
            interrupt,
            is_sparse=self._attention == "sparse",
        )
        self._count(found.num_drafted, found.num_accepted)
        return [
            Advance(token_ids=token_ids, logprobs=logprobs, is_finite=is_finite)
            for token_ids, logprobs, is_finite in zip(
                found.token_ids, found.logprobs, found.is_finite, strict=True
            )
        ]

    def _count(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        for depth, (drafted, accepted) in enumerate(zip(num_drafted, num_accepted, strict=True)):
            self.num_drafted[depth] += drafted
            self.num_accepted[depth] += accepted

    # One round in torch, for whatever a request asks ----------------------------------------------

    def _round(self, weights: EngineWeights, requests: Sequence[Request]) -> list[Advance]:
        samplings = [request.sampling for request in requests]
        allowed = [request.allowed() for request in requests]
        draft_ids_BD, draft_BDV, counts = self._drafts(weights, requests)
        check = self._verified_rows(weights, requests, draft_ids_BD, counts)
        num_rows = [count + 1 for count in counts]
        main_NV = sampling_probability(
            check.logits,
            [s for s, n in zip(samplings, num_rows, strict=True) for _ in range(n)],
            # Of a constrained request nothing is drafted, so it has one row.
            [a for a, n in zip(allowed, num_rows, strict=True) for _ in range(n)],
        )
        num_places = draft_ids_BD.shape[1] + 1
        main_BTV = main_NV.new_zeros(len(requests), num_places, main_NV.shape[1])
        for row, rows in enumerate(check.rows):
            main_BTV[row, : num_rows[row]] = main_NV[rows]
        seeds = [request.seed for request in requests]
        first_B = np.asarray([r.draw_position for r in requests], dtype=np.int64)
        positions_TB = np.arange(num_places)[:, None] + first_B
        outcome = verified(
            main_BTV,
            draft_BDV,
            draft_ids_BD,
            torch.from_numpy(uniforms(seeds, positions_TB[:-1], Stream.ACCEPT)).T,
            torch.from_numpy(uniforms(seeds, positions_TB)).T,
        )
        advances = []
        for row, request in enumerate(requests):
            count = int(outcome.num_accepted[row])
            self._count(
                [int(d < counts[row]) for d in range(self._num_drafts)],
                [int(d < count) for d in range(self._num_drafts)],
            )
            token_ids = [*draft_ids_BD[row, :count].tolist(), int(outcome.next_ids[row])]
            advances.append(self._advance(weights, request, token_ids, check, row, allowed[row]))
        _keep(weights, requests, advances, check)
        return advances

    def _drafts(
        self, weights: EngineWeights, requests: Sequence[Request]
    ) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D V"], list[int]]:
        """Draft for each request, and leave the row of its newest token.

        Returns:
            drafts, what each was drawn from, and how many each request has; beyond these there is no probability.
        """
        seats = [request.used_seat() for request in requests]
        chain = _drafter(weights).chain(
            [seat.index for seat in seats],
            [seat.length for seat in seats],
            is_sparse=self._attention == "sparse",
        )
        samplings = [request.sampling for request in requests]
        seeds = [request.seed for request in requests]
        tokens_B = torch.tensor([request.last_token for request in requests])
        logits_BV = chain.read(tokens_B)
        most = [
            0 if request.walk is not None else min(self._num_drafts, request.num_left - 1)
            for request in requests
        ]
        counts = [0] * len(requests)
        chance_B = torch.ones(len(requests), dtype=torch.float64)
        ids: list[Tensor] = []
        probabilities: list[Tensor] = []
        while any(count < limit for count, limit in zip(counts, most, strict=True)):
            depth = len(ids)
            if depth:
                logits_BV = chain.read(tokens_B)
            is_drafted_B1 = (torch.tensor(most) > depth)[:, None]
            probability_BV = sampling_probability(logits_BV, samplings) * is_drafted_B1
            draws_B = uniforms(
                seeds, [request.draw_position + depth for request in requests], Stream.DRAFT
            )
            tokens_B = inverse_cdf(probability_BV, torch.from_numpy(draws_B))
            sure_BV = self._sureness(logits_BV, probability_BV, samplings)
            # What would make its chain too unlikely has no probability as a draft.
            is_likely_BV = chance_B[:, None] * sure_BV >= self._least
            probability_BV = torch.where(is_likely_BV, probability_BV, 0.0)
            chance_B *= sure_BV.gather(1, tokens_B[:, None])[:, 0]
            ids.append(tokens_B)
            probabilities.append(probability_BV)
            own_B = probability_BV.gather(1, tokens_B[:, None])[:, 0]
            for row, token_id in enumerate(tokens_B.tolist()):
                if most[row] <= depth:
                    continue
                has_draft = bool(own_B[row] > 0)
                counts[row] += has_draft
                if not has_draft or token_id in samplings[row].stop_ids:
                    most[row] = counts[row]
        if not ids:
            return (
                torch.zeros(len(requests), 0, dtype=torch.long),
                logits_BV[:, None][:, :0],
                counts,
            )
        return torch.stack(ids, dim=1), torch.stack(probabilities, dim=1), counts

    def _sureness(
        self, logits_BV: Tensor, probability_BV: Tensor, samplings: Sequence[Sampling]
    ) -> Float[Tensor, "B V"]:
        """Return how likely each draft is; of greedy ones, how likely the layer has them at temperature 1."""
        greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0]
        if greedy:
            probability_BV = probability_BV.clone()
            probability_BV[greedy] = torch.softmax(logits_BV[greedy].float(), dim=-1)
        return probability_BV

    def _verified_rows(
        self,
        weights: EngineWeights,
        requests: Sequence[Request],
        draft_ids_BD: Tensor,
        counts: Sequence[int],
    ) -> "_Check":
        seats = [request.used_seat() for request in requests]
        tokens: list[Tensor] = []
        rows: list[slice] = []
        for row, request in enumerate(requests):
            start = rows[-1].stop if rows else 0
            rows.append(slice(start, start + counts[row] + 1))
            tokens += [torch.tensor([request.last_token]), draft_ids_BD[row, : counts[row]]]
        tokens_N = torch.cat(tokens)
        hidden_NH = weights.model.extend(
            tokens_N,
            [seat.index for seat in seats],
            [seat.length for seat in seats],
            [count + 1 for count in counts],
            weights.cache,
            attention=self._attention,
        )
        logits_NV = weights.model.logits(hidden_NH, weights.cache)
        return _Check(tokens_N, hidden_NH, logits_NV, rows)

    def _advance(
        self,
        weights: EngineWeights,
        request: Request,
        token_ids: list[int],
        check: "_Check",
        row: int,
        allowed: AllowedIds | None,
    ) -> Advance:
        """Say what is to be known of the tokens; they end with the first whose logits are not finite."""
        rows, sampling = check.rows[row], request.sampling
        logits_TV = check.logits[rows][: len(token_ids)]
        is_finite_T = torch.isfinite(logits_TV).all(dim=-1)
        if not bool(is_finite_T.all()):
            num_sound = int(is_finite_T.long().argmin())
            token_ids, logits_TV = token_ids[: num_sound + 1], logits_TV[: num_sound + 1]
            logits_TV = torch.where(is_finite_T[: num_sound + 1, None], logits_TV, 0.0)
        ids_T = torch.tensor(token_ids)
        samplings = [sampling] * len(token_ids)
        if sampling.temperature == 0:
            logprobs, kept = torch.zeros(len(ids_T)), []
        elif sampling.is_truncated or allowed is not None:
            logprobs_TV = sampling_logprobs(logits_TV, samplings, [allowed] * len(token_ids))
            logprobs = logprobs_TV.gather(1, ids_T[:, None])[:, 0]
            kept = [kept_of(own, sampling) for own in logprobs_TV]
        else:
            # By the trainer's own function, so that they are the trainer's bits.
            logprobs, _ = token_logprobs(
                check.hidden[rows][: len(token_ids)],
                weights.model.output_weight,
                ids_T,
                temperature=sampling.temperature,
            )
            kept = []
        return Advance(
            token_ids=token_ids,
            logprobs=logprobs.tolist(),
            is_finite=bool(is_finite_T.all()),
            kept_ids=kept,
            raw_logprobs=raw_logprobs(logits_TV, samplings, ids_T).tolist(),
        )


@dataclass(frozen=True, slots=True)
class _Check:
    """What the main model says of all drafts."""

    token_ids: Int[Tensor, " N"]
    """Of each request its newest token and its drafts."""
    hidden: Float[Tensor, "N hidden"]
    logits: Float[Tensor, "N V"]
    rows: list[slice]
    """Of each request."""


def _keep(
    weights: EngineWeights,
    requests: Sequence[Request],
    advances: Sequence[Advance],
    check: _Check,
) -> None:
    """Take in the newest token and the drafts that stay."""
    seats = [request.used_seat() for request in requests]
    counts = [len(advance.token_ids) for advance in advances]
    kept_N = torch.cat(
        [
            torch.arange(rows.start, rows.start + n)
            for rows, n in zip(check.rows, counts, strict=True)
        ]
    )
    _drafter(weights).take(
        check.token_ids[kept_N],
        check.hidden[kept_N],
        [seat.index for seat in seats],
        [seat.length for seat in seats],
        counts,
    )


def _drafter(weights: EngineWeights) -> Drafter:
    model = weights.model
    assert isinstance(model, GlmMoeDsa)
    return drafter_of(model, weights.cache)


def cache_for(model: Decoder, config: EngineConfig, *, max_context_tokens: int) -> PagedCache:
    """Return the engine's cache.

    Args:
        model: computes with it.
        config: says whether it drafts.
        max_context_tokens: longest sequence [tokens].

    Raises:
        ConfigError: the cache is too small for one sequence of the longest context, or the model cannot draft.
    """
    num_pages = config.num_pages_for(max_context_tokens)
    # A sequence that ended keeps its seat where layers remember instead of keeping rows.
    num_slots = config.max_running + config.max_running // 2
    sizes = {"num_pages": num_pages, "page_tokens": config.page_tokens}
    if config.num_speculative_tokens:
        glm = checked_to_draft(model, config.num_speculative_tokens)
        cache = glm.new_drafting_cache(num_slots, max_context_tokens, **sizes)
    else:
        cache = model.new_cache(num_slots, max_context_tokens, **sizes)
    if config.cache_quantisation == "fp8":
        cache.rounding = _rounding_of(model)
    return cache


def _rounding_of(model: Decoder) -> Mapping[str, RowRounding]:
    try:
        return model.fp8_rows()
    except ContractError as error:
        raise ConfigError(f"engine.cache_quantisation='fp8': {error}") from error


def decoding_for(config: EngineConfig, *, attention: Attention) -> Decoding:
    """Return how the engine draws tokens."""
    if not config.num_speculative_tokens:
        return Decoding(attention=attention)
    return Speculation(
        attention=attention,
        num_drafts=config.num_speculative_tokens,
        least_probability=config.min_draft_probability,
    )
