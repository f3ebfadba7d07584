"""The trainer's own process: same numbers, typed errors, no orphans."""

import asyncio
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from trainer_fixtures import ends_soon, make_batch, random_batch, tiny_model

from longarc.algos import losses
from longarc.config.training import OptimizerConfig
from longarc.errors import ConfigError, ContractError, ResourceError
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from longarc.trainer.process import ProcessTrainer


def build(directory):
    """Factory that the child imports and calls."""
    return PolicyTrainer(
        tiny_model(),
        PolicySettings(optimizer=OptimizerConfig(lr=1e-2), num_steps=10, micro_batch_tokens=4096),
        loss=losses.icepop,
        publish_directory=directory,
    )


class Sleeper:
    """A trainer that never finishes a step."""

    async def step(self, batch):
        sys.stdout.write("busy\n")
        sys.stdout.flush()
        time.sleep(60)

    async def publish(self):
        return torch.get_num_threads()

    async def save(self, directory):
        raise KeyError(directory)


def build_sleeper():
    return Sleeper()


def refuse():
    raise ConfigError("no such recipe")


async def test_a_child_trains_exactly_like_the_parent_and_leaves_the_loop_free(tmp_path):
    async with await ProcessTrainer.start(partial(build, str(tmp_path)), num_threads=1) as trainer:
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        report = await trainer.step(random_batch())
        counting.cancel()
        source = await trainer.publish()
        assert turns > 10
    here = build(str(tmp_path))
    assert here.take_step(random_batch()).weights_sha256 == report.weights_sha256
    assert Path(source.path).is_file()


async def test_errors_of_the_child_arrive_as_themselves_with_its_traceback(tmp_path):
    async with await ProcessTrainer.start(partial(build, str(tmp_path)), num_threads=1) as trainer:
        with pytest.raises(ContractError, match="no trained token") as caught:
            await trainer.step(make_batch([]))
        assert "take_step" in caught.value.__notes__[0]
        assert (await trainer.step(random_batch())).policy_version == 1
        trainer._process.kill()
        with pytest.raises(ResourceError, match=r"exit code -9 \(SIGKILL\) during publish"):
            await trainer.publish()


async def test_a_factory_that_fails_fails_the_start():
    with pytest.raises(ConfigError, match="no such recipe"):
        await ProcessTrainer.start(refuse, num_threads=1)


async def test_a_factory_that_cannot_be_pickled_is_refused():
    with pytest.raises(ContractError, match="factory"):
        await ProcessTrainer.start(lambda: build_sleeper(), num_threads=1)


async def test_a_cancelled_caller_leaves_the_child_busy_and_closing_ends_it():
    trainer = await ProcessTrainer.start(build_sleeper, num_threads=1)
    with pytest.raises(ContractError, match="failed in save: KeyError"):
        await trainer.save("x")
    assert await trainer.publish() == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await trainer.step(make_batch([]))
    await trainer.close()
    assert not trainer._process.is_alive()
    assert trainer._process.exitcode == -signal.SIGKILL


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from test_process_trainer import build_sleeper, make_batch
from longarc.trainer.process import ProcessTrainer

async def main():
    trainer = await ProcessTrainer.start(build_sleeper, num_threads=1)
    print(trainer.pid, flush=True)
    await trainer.step(make_batch([]))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_busy_child_dies_with_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(path=[str(Path(__file__).parent)]))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "busy\n"
        parent.send_signal(signal.SIGKILL)
    assert ends_soon(child)
