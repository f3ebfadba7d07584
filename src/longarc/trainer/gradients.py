"""Where the gradients of a step come from: the part of a step that processes can share.

An :class:`Objective` adds the gradients of documents to a model and returns what it summed on the way.
A :class:`GradientSource` does that for a whole step, here or with other processes beside this one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from longarc.models.critic import Critic
from longarc.models.decoder_base import Decoder
from longarc.trainer.packing import D, Document


class Sums(Protocol):
    """What a step adds up over its documents; plain numbers, so that it can cross processes."""

    def add(self, other: Self) -> None:
        """Add the sums of other documents of the step."""
        ...


M = TypeVar("M", bound=Decoder | Critic)
M_contra = TypeVar("M_contra", bound=Decoder | Critic, contravariant=True)
D_contra = TypeVar("D_contra", bound=Document, contravariant=True)
S = TypeVar("S", bound=Sums)
S_co = TypeVar("S_co", bound=Sums, covariant=True)


class Objective(Protocol[M_contra, D_contra, S_co]):
    """What is learned from documents of one kind; picklable, so that other processes learn the same."""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens in one forward and backward [tokens]."""
        ...

    @property
    def attention(self) -> Literal["dense", "sparse"]:
        """Which keys are attended to."""
        ...

    def select_parameters(self, model: M_contra) -> None:
        """Let exactly the parameters that are trained require a gradient."""
        ...

    def add_gradients(self, model: M_contra, documents: Sequence[D_contra], step: int) -> S_co:
        """Add the gradients of documents, which are of sums and not of means, to ``.grad``.

        Args:
            model: receives them.
            documents: any part of the step's documents; none is allowed.
            step: for messages.

        Raises:
            LongArcError: a document cannot be learned from; no weight is changed.
        """
        ...


Gradients: TypeAlias = Callable[[Sequence[D], int], S]
"""Adds the gradients of a step's documents to ``.grad``; the number is the step, for messages."""


class GradientSource(Protocol):
    """Where gradients are computed: prepares for a model, which is then updated in place."""

    def __call__(
        self, model: M, objective: Objective[M, D, S], *, beside: bool = False
    ) -> Gradients[D, S]:
        """Return what computes the gradients of ``objective`` for this model.

        Args:
            model: is updated in place by the caller.
            objective: what is learned.
            beside: whether what was returned before stays in use, as a policy's does beside its critic's.
        """
        ...


def sum_counts(
    counts: npt.NDArray[np.float64] | None, others: npt.NDArray[np.float64] | None
) -> npt.NDArray[np.float64] | None:
    """Add tokens per expert, where None is nothing yet."""
    if counts is None or others is None:
        return others if counts is None else counts
    return counts + others


def in_this_process(
    model: M, objective: Objective[M, D, S], *, beside: bool = False
) -> Gradients[D, S]:
    """Compute all gradients here; the simplest :class:`GradientSource`."""
    objective.select_parameters(model)
    return partial(objective.add_gradients, model)
