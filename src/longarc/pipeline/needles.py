"""How much of long contexts a model finds again: needles of several kinds, answered with the right text before.

Teacher-forced: one pass over a text scores all its answers. An answer is right where each of its tokens is
the likeliest one, which is what greedy decoding would have written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longarc.data.needles import KINDS, NeedleKind, NeedleText, held_out
from longarc.models.decoder_base import Attention, Decoder
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.packing import Document

_PACKED_TOKENS = 8192
"""Tokens of texts that are computed together [tokens]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleScore:
    """What was found of some texts."""

    num_right: int
    """Answers of which every token is the likeliest."""
    num_answers: int
    logprob_sum: float
    """Of the answers' tokens, given the text before them [nats]."""

    @property
    def right_frac(self) -> float:
        """Share of right answers."""
        return self.num_right / self.num_answers

    @property
    def logprob(self) -> float:
        """Of an answer, on average [nats]."""
        return self.logprob_sum / self.num_answers

    def __add__(self, other: "NeedleScore") -> "NeedleScore":
        return NeedleScore(
            num_right=self.num_right + other.num_right,
            num_answers=self.num_answers + other.num_answers,
            logprob_sum=self.logprob_sum + other.logprob_sum,
        )


def needle_document(text: NeedleText, tokenizer: Tokenizer) -> Document:
    """Return a text to train on: its answers are targets, hay and questions are context."""
    ids: list[int] = []
    mask: list[bool] = []
    for piece in text.pieces:
        encoded = tokenizer.encode(piece.text)
        ids += encoded
        mask += [piece.is_answer] * len(encoded)
    return Document(token_ids=ids, train_mask=mask)


def score_kind(
    model: Decoder,
    tokenizer: Tokenizer,
    kind: NeedleKind,
    *,
    context_tokens: int,
    num_texts: int,
    num_keys: int = 16,
    seed: int = 0,
    attention: Attention = "dense",
) -> NeedleScore:
    """Score held-out texts of one kind and length."""
    texts = held_out(
        kind,
        seed=seed,
        count=num_texts,
        num_tokens=context_tokens,
        count_tokens=lambda text: len(tokenizer.encode(text)),
        num_keys=num_keys,
    )
    per_pass = max(1, _PACKED_TOKENS // context_tokens)
    score = NeedleScore(num_right=0, num_answers=0, logprob_sum=0.0)
    for start in range(0, len(texts), per_pass):
        batch = texts[start : start + per_pass]
        score += score_texts(model, tokenizer, batch, attention=attention)
    return score


@torch.inference_mode()
def score_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: Sequence[NeedleText],
    *,
    attention: Attention = "dense",
) -> NeedleScore:
    """Score the answers of some texts in one pass."""
    ids: list[int] = []
    lengths: list[int] = []
    answers: list[range] = []
    for text in texts:
        first = len(ids)
        for piece in text.pieces:
            encoded = tokenizer.encode(piece.text)
            if piece.is_answer:
                answers.append(range(len(ids), len(ids) + len(encoded)))
            ids += encoded
        lengths.append(len(ids) - first)
    token_ids = torch.tensor(ids)
    places = torch.tensor([place for answer in answers for place in answer])
    hidden = model(token_ids, Layout.documents(lengths), attention=attention).hidden
    logits = project_logits(
        hidden[places - 1], model.output_weight, compute_dtype=model.compute_dtype
    )
    logprobs = logits.log_softmax(dim=-1)
    targets = token_ids[places]
    is_best = torch.split(logprobs.argmax(dim=-1) == targets, [len(answer) for answer in answers])
    return NeedleScore(
        num_right=sum(bool(tokens.all()) for tokens in is_best),
        num_answers=len(answers),
        logprob_sum=logprobs.gather(1, targets[:, None]).sum().item(),
    )


def needle_score(
    model: Decoder,
    tokenizer: Tokenizer,
    *,
    context_tokens: int = 1024,
    num_texts: int = 16,
    num_keys: int = 16,
    seed: int = 1,
    kinds: Sequence[NeedleKind] = KINDS,
    attention: Attention = "dense",
) -> float:
    """Return the share of right answers, the mean over kinds: the scorer that the search for patterns has by default.

    A hundredth of the answers' log-probability is added, so that patterns differ where all or none are right.
    """
    scores = [
        score_kind(
            model,
            tokenizer,
            kind,
            context_tokens=context_tokens,
            num_texts=num_texts,
            num_keys=num_keys,
            seed=seed,
            attention=attention,
        )
        for kind in kinds
    ]
    return sum(score.right_frac + 0.01 * score.logprob for score in scores) / len(scores)
