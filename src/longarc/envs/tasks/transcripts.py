"""``transcripts``: conversations that somebody recorded, as demonstrations for sft.

They come from ATIF documents of any program, from LongArc's own JSON lines, or from the ledger of a run (which is
rejection sampling). What a program recorded is rendered with the chat format of the run that learns from it, whatever
tokens it had: another model's ids mean nothing here.

Every answer is learnt from once. In context, but not learnt from, are answers that an earlier conversation of the
same trajectory has, that were copied from another trajectory or written by no model, that were cut off, and calls
that could not be read (a chat format cannot write what was not understood). Side requests are left out, and so
is what did not complete.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from longarc.config.settings import Settings
from longarc.envs.tasks.settings import settings_from
from longarc.envs.tasks.splits import rng_of
from longarc.errors import ConfigError
from longarc.records.conversation import Conversation
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.segment import SegmentKind
from longarc.records.trajectory import Trajectory
from longarc.records.turn import lineage
from longarc.runs.atif_import import untrained_messages
from longarc.runs.exchange import read_trajectories


class TranscriptsSettings(Settings):
    """What is read, and what of it is learnt from."""

    path: str
    """A file (.json, .jsonl), a directory of them, or a run directory."""
    stage: str | None = None
    """Only trajectories of this stage; None for all."""
    min_reward: float | None = None
    """Only trajectories with at least this reward; documents of other programs have none. None for all."""
    max_chars: int | None = Field(None, ge=1)
    """Conversations with more text are left out [characters]; None leaves out none, and the stage refuses one that
    is longer than its micro-batch."""
    seed: int = Field(0, ge=0)
    """Of the order, which is another one each time all were shown."""


class Transcripts:
    """Shows recorded conversations, all of them before one comes again."""

    name = "transcripts"

    def __init__(self, **settings: object) -> None:
        """Read them.

        Raises:
            ConfigError: a setting is unknown, or nothing is left to learn from.
            ContractError: a file is damaged.
        """
        self._settings = settings_from(TranscriptsSettings, settings, family=self.name)
        self._conversations: list[Conversation] = []
        self._order: tuple[int, list[int]] = (-1, [])
        """Number of an epoch, and its order."""
        trajectories = 0
        for trajectory in read_trajectories(Path(self._settings.path)):
            trajectories += 1
            self._conversations += self._learnt_from(trajectory)
        if not self._conversations:
            raise ConfigError(
                f"task family {self.name!r}: none of the {trajectories} trajectories in {self._settings.path} is learnt from, with "
                f"stage={self._settings.stage}, min_reward={self._settings.min_reward}, max_chars={self._settings.max_chars}, "
                f"and only what completed; relax these, or give another path"
            )

    def demonstration(self, index: int, *, error_frac: float = 0.0) -> Conversation:
        """Return one of the conversations; all of them come before one comes again.

        Args:
            index: position in an endless sequence.
            error_frac: without effect: what was recorded has the mistakes that it has.
        """
        epoch, position = divmod(index, len(self._conversations))
        if self._order[0] != epoch:
            order = list(range(len(self._conversations)))
            rng_of(self.name, self._settings.seed, epoch).shuffle(order)
            self._order = (epoch, order)
        return self._conversations[self._order[1][position]]

    def all_demonstrations(self) -> Iterator[Conversation]:
        """Yield every conversation once, in the order in which they were read."""
        yield from self._conversations

    def _learnt_from(self, trajectory: Trajectory) -> list[Conversation]:
        settings = self._settings
        if trajectory.outcome is not Outcome.COMPLETED:
            return []
        if settings.stage not in (None, trajectory.stage):
            return []
        if settings.min_reward is not None and (
            trajectory.reward is None or trajectory.reward < settings.min_reward
        ):
            return []
        return [
            conversation
            for conversation in conversations_of(trajectory)
            if settings.max_chars is None or num_chars(conversation) <= settings.max_chars
        ]


def conversations_of(trajectory: Trajectory) -> list[Conversation]:
    """Return what a trajectory shows: one conversation for each context that was not continued."""
    if not trajectory.turns:
        told = untrained_messages(trajectory)
        untrained = _given(trajectory) if told is None else told
        found = [_conversation(trajectory, trajectory.messages, trajectory.tools, untrained)]
    else:
        found = list(_branches(trajectory))
    return [conversation for conversation in found if conversation is not None]


def num_chars(conversation: Conversation) -> int:
    """Return how much text a conversation has [characters]."""
    return sum(
        len(message.content)
        + len(message.reasoning or "")
        + sum(len(call.name) + len(str(call.arguments)) for call in message.tool_calls)
        for message in conversation.messages
    )


def _given(trajectory: Trajectory) -> frozenset[int]:
    """Return the positions of answers that a task was given with: the policy spoke the last ones."""
    answers = [i for i, m in enumerate(trajectory.messages) if m.role is Role.ASSISTANT]
    return frozenset(answers[: max(len(answers) - trajectory.num_turns, 0)])


def _branches(trajectory: Trajectory) -> Iterator[Conversation | None]:
    turns = trajectory.turns
    kinds = {segment.order: segment.kind for segment in trajectory.segments}
    continued = {turn.parent for turn in turns}
    shown: set[int] = set()
    for leaf in range(len(turns)):
        if leaf in continued or kinds.get(turns[leaf].segment_order) is SegmentKind.SIDE:
            continue
        path = lineage(turns, leaf)
        messages: list[Message] = []
        own: set[int] = set()
        for position in path:
            turn = turns[position]
            messages += turn.said
            if position not in shown and turn.finish_reason == "stop":
                own.add(len(messages))
            messages.append(turn.answer)
        shown.update(path)
        answers = {i for i, m in enumerate(messages) if m.role is Role.ASSISTANT}
        yield _conversation(
            trajectory, tuple(messages), turns[path[0]].tools, frozenset(answers - own)
        )


def _conversation(
    trajectory: Trajectory,
    messages: tuple[Message, ...],
    tools: tuple[ToolSpec, ...],
    untrained: frozenset[int],
) -> Conversation | None:
    """Return a conversation; None where nothing in it is learnt from."""
    answers = [i for i, message in enumerate(messages) if message.role is Role.ASSISTANT]
    unread = {i for i in answers if any(call.error for call in messages[i].tool_calls)}
    if not set(answers) - untrained - unread:
        return None
    return Conversation(
        messages=messages,
        tools=tools,
        untrained=frozenset(answers) & (untrained | unread),
        thinking=any(messages[i].reasoning is not None for i in answers),
        family=trajectory.family,
        difficulty=trajectory.difficulty,
    )
