"""Several decode steps in one native call: what the caller asks for, what it gets, how it is interrupted.

The C++ side is ``cpu/steps.h``; ``NativeDecoder.steps`` makes the call.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Interrupt:
    """Asks a call in another thread to end after its current step."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._flag)
        """Where the native code looks; valid as long as this object lives."""

    def set(self) -> None:
        """Let the running call end."""
        self._flag.value = 1

    def clear(self) -> None:
        """Let later calls run."""
        self._flag.value = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How the tokens of some steps are drawn. Shape letters: S steps, B sequences."""

    temperatures: Float[Tensor, " B"]
    """0 takes the most likely token."""
    uniforms: Float[Tensor, "S B"]
    """fp64 in [0, 1); as many steps are made at most."""
    stop_ids: Sequence[Sequence[int]]
    """Of each sequence: no step follows one that draws one of these."""

    def stops(self) -> tuple[Int[Tensor, " ids"], Int[Tensor, " B"]]:
        """Return all stop ids one after another, and where those of each sequence end."""
        return stop_lists(self.stop_ids)


def stop_lists(
    stop_ids: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, " ids"], Int[Tensor, " B"]]:
    """Return the stop ids of all sequences one after another, and where those of each sequence end."""
    ids = torch.tensor(list(chain.from_iterable(stop_ids)), dtype=torch.long)
    return ids, torch.tensor(list(accumulate(len(own) for own in stop_ids)))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What some steps drew; S is the number of steps made."""

    tokens: Int[Tensor, "S B"]
    logprobs: Float[Tensor, "S B"]
    """Of the tokens [nats]."""
    is_finite: Tensor
    """Whether the logits of the last step were finite, [B]; where not, its token means nothing."""
    kept_ids: Sequence[tuple[int, ...]] = ()
    """Of a single step: what each token was drawn from, [B], () for the whole vocabulary. Empty where nobody asked."""
    raw_logprobs: Sequence[float] = ()
    """Of a single step: log-probabilities [nats] at temperature 1 over the whole vocabulary. Empty likewise."""
