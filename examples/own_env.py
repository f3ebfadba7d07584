"""A task family of your own: answers are worth the share of their letters that are capitals."""

from collections.abc import Iterator
from itertools import count

from longarc.envs.single_turn import SingleTurn
from longarc.records.message import Message, Role
from longarc.records.ports import Env, SandboxBackend
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward


class Shout:
    name = "shout"
    thinking = False

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        for index in count(cursor):
            ask = Message(role=Role.USER, content=f"Shout at the {split} crowd number {index}.")
            yield Task(id=f"shout/{split}/{index}", family="shout", split=split, messages=(ask,))

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        return SingleTurn(task)

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        answer = episode.messages[-1].content
        return Reward(value=sum(map(str.isupper, answer)) / max(1, sum(map(str.isalpha, answer))))
