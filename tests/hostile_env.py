"""A task family and losses that do what user code does wrong; found by import path in recipes."""

import dataclasses
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from longarc.envs.single_turn import SingleTurn
from longarc.records.message import Message, Role
from longarc.records.outcome import Outcome
from longarc.records.ports import SandboxSpec
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward

MODES = (
    "fine",
    "raises",
    "returns_garbage",
    "reports_a_cancellation",
    "loses_its_box",
    "blocks_the_loop",
    "grade_is_nan",
    "grade_raises",
    "grade_is_garbage",
)


def once(flag, act):
    """Act unless the file is there, which is made."""
    if not Path(flag).exists():
        Path(flag).touch()
        act()


def kill_children():
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)


@dataclass
class HostileEnv:
    """One rollout that goes wrong in the way its task says."""

    task: Task
    mode: str
    sandboxes: object
    asks_to_stop: str

    async def run(self, policy):
        if self.asks_to_stop and self.task.split == "test":
            once(self.asks_to_stop, lambda: os.kill(os.getpid(), signal.SIGTERM))
        if self.mode == "raises":
            raise ValueError("the world is broken")
        if self.mode == "returns_garbage":
            return 42
        if self.mode == "reports_a_cancellation":
            return EpisodeResult(outcome=Outcome.CANCELLED_STALE, messages=(), num_turns=0)
        if self.mode == "loses_its_box":
            box = await self.sandboxes.create(SandboxSpec(files={"a": b"1"}))
            os.kill(box.vessel.server_pid, signal.SIGKILL)
            try:
                await box.read("a")
            finally:
                await box.close()
        if self.mode == "blocks_the_loop":
            time.sleep(0.3)
        return await SingleTurn(self.task).run(policy)


class Hostile:
    """Tasks of every mode in turn."""

    name = "hostile"
    thinking = False

    def __init__(self, *, modes=MODES, flag="", prompt="Say it.", asks_to_stop=""):
        """Take the modes in turn.

        The files ``flag`` and ``asks_to_stop`` are made once the trainer process was killed, and once
        the process was asked to stop during an evaluation; empty does neither.
        """
        self.modes, self.flag, self.prompt = tuple(modes), flag, prompt
        self.asks_to_stop = asks_to_stop

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        for index in count(cursor):
            mode = self.modes[index % len(self.modes)]
            ask = Message(role=Role.USER, content=self.prompt)
            yield Task(id=f"{mode}/{split}/{index}", family="hostile", split=split, messages=(ask,))

    def open(self, task, *, sandboxes, seed):
        return HostileEnv(task, task.id.split("/")[0], sandboxes, self.asks_to_stop)

    async def grade(self, task, episode):
        mode, _, index = task.id.split("/")
        if mode == "grade_is_nan":
            return Reward(value=math.nan)
        if mode == "grade_raises":
            raise KeyError("no answer key")
        if mode == "grade_is_garbage":
            return "ten points"
        if self.flag and int(index) > 1:
            once(self.flag, kill_children)
        return Reward(value=float(len(episode.messages[-1].content) % 2))


TRIAL_TOKENS = 4
"""What a loss is tried with before a run; the following fail later."""


def loss(inputs):
    """The loss that recipes name; tests put one of the following in its place."""
    from longarc.algos.losses import icepop

    if len(inputs.advantages) <= TRIAL_TOKENS:
        return icepop(inputs)
    raise ValueError("no such thing as a loss")


def hopeless_loss(inputs):
    raise ValueError("no such thing as a loss")


def nan_loss(inputs):
    from longarc.algos.losses import icepop

    good = icepop(inputs)
    if len(inputs.advantages) <= TRIAL_TOKENS:
        return good
    return dataclasses.replace(good, loss_sum=good.loss_sum * math.nan)
