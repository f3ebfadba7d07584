"""Gradients from two processes: the same numbers every time, typed errors, no orphans."""

import multiprocessing
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from trainer_fixtures import (
    TINY_LLAMA,
    ends_soon,
    make_batch,
    make_group,
    make_segment,
    make_trajectory,
    random_batch,
    tiny_model,
)

from longarc.algos import losses
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import ConfigError, ContractError, ResourceError
from longarc.records.metric import combine
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.gradients import in_this_process
from longarc.trainer.packing import Document
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer
from longarc.trainer.update import weights_sha256


@pytest.fixture(scope="module")
def pool():
    pool = GradientPool(2)
    pool.start()
    yield pool
    pool.close()


def documents(*, seed=0, count=6):
    """Documents that share nothing: what is shared counts once for the indexer, but in each shard."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(64, (count, 40), generator=generator).tolist()
    return [Document(token_ids=token_ids[: 20 + i]) for i, token_ids in enumerate(drawn)]


def make_trainer(gradients, *, model=None, dtype=torch.float32, **changes):
    values = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "num_steps": 10,
        "micro_batch_tokens": 64,
        "attention": "sparse",
    }
    return SupervisedTrainer(
        model or tiny_model(dtype=dtype),
        SupervisedSettings(**(values | changes)),
        gradients=gradients,
    )


def digest_after(trainer, step_documents):
    trainer.step(step_documents)
    return weights_sha256(trainer.model)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention": "dense"}, {"attention": "dense", "mode": "indexer_warmup"}],
    ids=["sparse", "dense", "warmup"],
)
@pytest.mark.parametrize("count", [6, 1], ids=["two shards", "an empty shard"])
def test_two_processes_compute_what_one_does(pool, changes, count):
    results = []
    for gradients in (in_this_process, pool.open):
        # AdamW divides each element by its size, which would blow up rounding where gradients are tiny.
        optimizer = OptimizerConfig(lr=1e-2, grad_clip=1e-3)
        trainer = make_trainer(gradients, dtype=torch.float64, optimizer=optimizer, **changes)
        reports = [trainer.step(documents(seed=step, count=count)) for step in range(2)]
        metrics = [combine(report.metrics) for report in reports]
        for values in metrics:
            del values["train/tokens_per_s"]
        results.append((metrics, weights(trainer)))
    (metrics, tensors), (other_metrics, other_tensors) = results
    for values, others in zip(metrics, other_metrics, strict=True):
        assert others == pytest.approx(values, rel=1e-9)
    for name, value in tensors.items():
        torch.testing.assert_close(other_tensors[name], value, rtol=0, atol=1e-7, msg=name)


def test_the_processes_recompute_and_offload_too(pool, tmp_path):
    policy = ActivationConfig(
        recomputed_layers=(1,), offloaded_layers="all", offload_directory=str(tmp_path / "none")
    )
    with pytest.raises(ResourceError, match="cannot offload activations"):
        make_trainer(pool.open, activations=policy).step(documents(count=1))
    (tmp_path / "none").mkdir()
    digests = [
        digest_after(make_trainer(pool.open, activations=activations), documents())
        for activations in (ActivationConfig(), policy)
    ]
    assert digests[0] == digests[1]


def policy_trainer(
    gradients, tmp_path, *, model=None, loss=losses.icepop, teachers=None, **changes
):
    values = {
        "optimizer": OptimizerConfig(lr=1e-2, use_muon=False, grad_clip=1e9, weight_decay=0.0),
        "num_steps": 10,
        "micro_batch_tokens": 60,
    }
    return PolicyTrainer(
        model or tiny_model(dtype=torch.float64),
        PolicySettings(**(values | changes)),
        loss=loss,
        publish_directory=str(tmp_path),
        teachers=teachers,
        gradients=gradients,
        clock=lambda: 0.0,
    )


@pytest.mark.parametrize("seeds", [{}, {"math": 7, "code": 8}], ids=["rewards", "teachers"])
def test_a_policy_step_of_two_processes_is_that_of_one(pool, tmp_path, seeds):
    reports, tensors = [], []
    for gradients in (in_this_process, pool.open):
        teachers = {f: tiny_model(seed=s, dtype=torch.float64) for f, s in seeds.items()}
        trainer = policy_trainer(gradients, tmp_path, teachers=teachers or None)
        steps = [random_batch(seed=s, step=s, version=s, families=("math", "code")) for s in (0, 1)]
        reports.append([trainer.take_step(batch) for batch in steps])
        tensors.append(weights(trainer))
    for name, value in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], value, rtol=0, atol=1e-9, msg=name)
    for one, two in zip(*reports, strict=True):
        metrics = [combine(report.metrics) for report in (one, two)]
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-9, abs=1e-12)
        assert two.num_trained_tokens == one.num_trained_tokens
        for expected, token_report in zip(one.token_reports, two.token_reports, strict=True):
            assert token_report.trajectory_id == expected.trajectory_id
            assert token_report.policy_logprobs == pytest.approx(expected.policy_logprobs)
            assert token_report.advantages == pytest.approx(expected.advantages)
        for name, samples in one.histograms.items():
            assert sorted(two.histograms[name]) == pytest.approx(sorted(samples), abs=1e-12)


def test_policy_steps_of_two_processes_are_bit_identical_every_time(pool, tmp_path):
    digests = [
        policy_trainer(pool.open, tmp_path, model=tiny_model())
        .take_step(random_batch())
        .weights_sha256
        for _ in range(2)
    ]
    assert digests[0] == digests[1]


def test_an_engine_and_a_worker_that_disagree_are_named_from_the_worker(pool, tmp_path):
    # Sorted by tokens, the second is the worker's.
    good = make_segment([1] * 20, (5, 6), [-4.0, -4.0])
    bad = make_segment([2] * 20, (5, 6), [-4.0, float("nan")])
    members = [
        make_trajectory([segment], name=name, reward=reward)
        for segment, name, reward in ((good, "good", 1.0), (bad, "bad", 0.0))
    ]
    trainer = policy_trainer(pool.open, tmp_path)
    before = weights(trainer)
    with pytest.raises(ContractError, match="trajectory bad: behaviour_logprobs of token 21"):
        trainer.take_step(make_batch([make_group(members)]))
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())
    trainer.take_step(random_batch())


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_loss_that_cannot_be_sent_is_refused_and_the_pool_goes_on(
    pool, tmp_path, monkeypatch, where
):
    def local_loss(inputs):
        return losses.icepop(inputs, low=0.5, high=2.0, eps_low=0.2, eps_high=0.2)

    if where == "there":  # it can be pickled by name, but no other process has it
        local_loss.__qualname__ = "local_loss"
        module = types.ModuleType("only_in_this_process")
        local_loss.__module__ = module.__name__
        module.local_loss = local_loss
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError, match="under its own name, or else set threads = 1"):
        policy_trainer(pool.open, tmp_path, loss=local_loss)
    policy_trainer(pool.open, tmp_path).take_step(random_batch())


def test_a_model_without_experts_or_indexer_is_shared_too(pool):
    digests = []
    for gradients in (pool.open, pool.open):
        trainer = make_trainer(gradients, model=tiny_model(config=TINY_LLAMA), attention="dense")
        digests.append(digest_after(trainer, documents()))
    assert digests[0] == digests[1]


def test_runs_are_bit_identical_also_when_one_is_resumed(pool, tmp_path):
    digests = []
    for _ in range(2):
        straight = make_trainer(pool.open)
        digests.append([digest_after(straight, documents(seed=s)) for s in range(4)])
    assert digests[0] == digests[1]

    interrupted = make_trainer(pool.open)
    for step in range(2):
        interrupted.step(documents(seed=step))
    interrupted.save(str(tmp_path))
    resumed = make_trainer(pool.open, model=tiny_model(seed=99))
    resumed.load(str(tmp_path))
    assert [digest_after(resumed, documents(seed=s)) for s in (2, 3)] == digests[0][2:]


@pytest.mark.parametrize("position", [0, 1], ids=["this process", "the worker"])
def test_an_error_arrives_as_itself_and_the_next_step_is_right(pool, position):
    trainer, other = make_trainer(pool.open), make_trainer(in_this_process)
    before = weights(trainer)
    # Documents are sorted: the first half is computed here.
    halves = [Document(token_ids=[kind] * 8 + [3, 4, 5]) for kind in (1, 2)]
    halves[position] = Document(token_ids=[position + 1] * 8 + [3, 99, 5])
    with pytest.raises(ContractError, match="99") as caught:
        trainer.step(halves)
    notes = getattr(caught.value, "__notes__", [])
    assert [("gradient process 1" in note) for note in notes] == [True] * position
    after = weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    norms = [combine(t.step(documents()).metrics)["grad/norm"] for t in (trainer, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_damaged_weights_stop_the_run_before_they_spread(pool):
    trainer = make_trainer(pool.open)
    with torch.no_grad():  # only the worker's half has this token
        trainer.model.get_parameter("model.embed_tokens.weight")[63] = float("nan")
    before = weights(trainer)
    with pytest.raises(ContractError, match=r"layer 0: .* of packed token 1 is not finite"):
        trainer.step([Document(token_ids=[1] * 9), Document(token_ids=[2, *[63] * 8])])
    after = weights(trainer)
    assert all(torch.equal(before[n].nan_to_num(), after[n].nan_to_num()) for n in before)


def test_ctrl_c_is_not_for_workers_and_a_killed_one_is_an_error():
    before = set(multiprocessing.active_children())
    pool = GradientPool(2)
    pool.start()
    (worker,) = set(multiprocessing.active_children()) - before
    trainer = make_trainer(pool.open)
    os.kill(worker.pid, signal.SIGINT)
    trainer.step(documents())
    unchanged = weights(trainer)
    worker.kill()
    with pytest.raises(ResourceError, match=r"exit code -9 \(SIGKILL\) during step 1"):
        trainer.step(documents())
    assert all(torch.equal(unchanged[n], value) for n, value in weights(trainer).items())
    pool.close()
    assert not worker.is_alive()


def test_closing_leaves_no_process_and_one_process_needs_none():
    before = set(multiprocessing.active_children())
    for num_processes in (1, 3):
        pool = GradientPool(num_processes)
        pool.start()
        pool.start()
        started = set(multiprocessing.active_children()) - before
        assert len(started) == num_processes - 1
        pool.close()
        pool.close()
        assert set(multiprocessing.active_children()) <= before


PARENT = """
import os, signal, sys, time
sys.path[:0] = {path!r}
from test_data_parallel import make_trainer
from longarc.trainer.data_parallel import GradientPool

if __name__ == "__main__":
    pool = GradientPool(2)
    pool.start()
    child = pool._workers[0]._process.pid
    os.kill(child, signal.SIGINT)  # the first child of this process, which still loads its libraries
    make_trainer(pool.open)
    print(child, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_worker_survives_ctrl_c_and_dies_with_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(path=[str(Path(__file__).parent)]))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert ends_soon(child)
