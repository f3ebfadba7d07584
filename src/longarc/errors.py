"""The exceptions LongArc raises on purpose, and the one way foreign exceptions become ours.

::

    LongArcError
     +-- ConfigError        a recipe, an option or a command line is wrong; exit code 2
     +-- ContractError      an invariant between two parts is broken: a bug, or corrupted data; stops the run
     |    +-- CheckpointError   a checkpoint is missing, truncated or made for something else
     |    +-- LedgerError       the ledger is damaged, locked or from a newer version
     |    +-- WeightMismatchError  an engine does not compute with the weights it was given
     +-- ResourceError      the machine lacks something: disk, memory, a tool, a permission
     |    +-- SandboxError      a sandbox could not be started or was lost
     +-- EngineError        the engine cannot answer: it is stopped, overloaded or produced no number
     |    +-- EngineFaultError    the engine computed something that is not a number
     |    +-- EngineRequestError  no engine with this model can answer the request: fix the request
     |    +-- EngineBusyError     too many requests wait already: send it later, or to another engine
     |    +-- EngineLostError     the engine stopped, drains or cannot be reached: another one can go on
     |    +-- WeightsRefusedError the announced weights cannot be loaded: the old ones stay
     +-- StalledError       nothing moves any more; the message names what everybody waits for
     +-- RolloutError       one rollout failed through its environment; becomes an Outcome, never stops a run

A message says what is wrong, the values, what was allowed and what to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class LongArcError(Exception):
    """Base of everything LongArc raises on purpose."""


class ConfigError(LongArcError):
    """The user asked for something that cannot be: fix the recipe or the command line."""


class ContractError(LongArcError):
    """Two parts disagree about data they share: a bug or corruption; never continue past it."""


class CheckpointError(ContractError):
    """A checkpoint is missing, truncated, or does not belong to this model or tokenizer."""


class LedgerError(ContractError):
    """The trajectory ledger cannot be used as it is."""


class WeightMismatchError(ContractError):
    """An engine's log-probabilities are not those of the weights it was given: what it samples cannot be trained."""


class ResourceError(LongArcError):
    """The machine lacks something that the work needs."""


class SandboxError(ResourceError):
    """A sandbox could not be started, or died under a rollout."""


class EngineError(LongArcError):
    """The rollout engine could not answer a request."""


class EngineFaultError(EngineError):
    """The engine computed logits that are not finite: its answer means nothing."""


class EngineRequestError(EngineError):
    """The request itself is wrong: too long, unknown ids, malformed; no engine will answer it."""


class EngineBusyError(EngineError):
    """The engine's queue is full; the same request may be answered later or elsewhere."""


class EngineLostError(EngineError):
    """The engine stopped, drains or cannot be reached; another engine can go on with the request."""


class WeightsRefusedError(EngineError):
    """Weights were announced that do not match their digest or the model; those in use stay."""


class StalledError(LongArcError):
    """Nothing has moved for too long, or nothing that was sampled can be trained."""


class RolloutError(LongArcError):
    """A rollout failed through no fault of the policy; carried as an environment outcome."""


@contextmanager
def boundary(error: type[LongArcError], doing: str) -> Iterator[None]:
    """Turn any foreign exception raised inside into ``error``, saying what was being done.

    Our own exceptions and cancellation pass through unchanged. This is the only place that
    catches ``Exception``: user code (environments, graders, losses) is called inside it.
    """
    try:
        yield
    except LongArcError:
        raise
    except Exception as cause:
        raise error(f"{doing}: {type(cause).__name__}: {cause}") from cause


def first_of(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group, with a note about the others."""
    first, *others = group.exceptions
    for other in others:
        first.add_note(f"Another task failed as well: {type(other).__name__}: {other}")
    return first_of(first) if isinstance(first, ExceptionGroup) else first
