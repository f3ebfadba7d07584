"""What recorded routing costs: the engine's speed, bytes of a token, and a training step that replays.

The miniature's shape with random weights; 16 sequences with prompts of their own are completed by engines that record
nothing, experts, and experts and keys, in turns. One step is then trained on what each of them sampled. Each of them has one
thread and is timed by the processor, which others on the machine disturb less than the clock; ratios are the medians of a
turn's.

Usage: python benchmarks/routing_replay.py [--repeats 5] [--prompt 384] [--new 128] [--quick]
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from typing import get_args

from common import Table, positive, processor_s

from longarc.algos import losses
from longarc.config.engine import EngineConfig
from longarc.config.model import GlmMoeDsaConfig
from longarc.config.training import OptimizerConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.threads import set_compute_threads
from longarc.records.batch import Batch
from longarc.records.outcome import Outcome
from longarc.records.sampling import RoutingReplay, Sampling
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.trajectory import Group, Trajectory
from longarc.runs.codec import compress, trajectory_body
from longarc.trainer.policy import PolicySettings, PolicyTrainer

NUM_SEQUENCES = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--prompt", type=positive, default=384, help="tokens")
    parser.add_argument("--new", type=positive, default=128, help="tokens")
    parser.add_argument("--quick", action="store_true", help="see whether it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.prompt, arguments.new = 1, 48, 16
    set_compute_threads(1)
    kinds: tuple[RoutingReplay, ...] = get_args(RoutingReplay)
    config = GlmMoeDsaConfig(max_position_embeddings=4096, initializer_range=0.05)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(config.vocab_size) for _ in range(arguments.prompt)]
        for _ in range(NUM_SEQUENCES)
    ]
    rates: dict[RoutingReplay, list[float]] = {kind: [] for kind in kinds}
    steps: dict[RoutingReplay, list[float]] = {kind: [] for kind in kinds}
    sampled: dict[RoutingReplay, list[Segment]] = {}
    for _ in range(arguments.repeats):
        for kind in kinds:
            model = build_model(config, seed=0)
            taken_s, sampled[kind] = asyncio.run(_completed(model, kind, prompts, arguments.new))
            rates[kind].append(NUM_SEQUENCES * (arguments.prompt + arguments.new) / taken_s)
            steps[kind].append(_trained(build_model(config, seed=0), kind, sampled[kind]))
    table = Table()
    for kind in kinds:
        _add_rows(table, kind, rates, steps, sampled[kind])
    table.close()


def _add_rows(
    table: Table,
    kind: RoutingReplay,
    rates: dict[RoutingReplay, list[float]],
    steps: dict[RoutingReplay, list[float]],
    segments: list[Segment],
) -> None:
    rate, step = statistics.median(rates[kind]), statistics.median(steps[kind])
    table.row(
        f"engine records {kind}: prompt and new tokens [tokens/s of one core]",
        f"{rate:,.0f} ({min(rates[kind]):,.0f} to {max(rates[kind]):,.0f})",
        ratio=_ratio(rates[kind], rates["none"]),
    )
    table.row(
        f"step replays {kind} [ms of one core]",
        f"{1000 * step:.0f} ({1000 * min(steps[kind]):.0f} to {1000 * max(steps[kind]):.0f})",
        ratio=_ratio(steps[kind], steps["none"]),
    )
    num_tokens = sum(len(segment.token_ids) for segment in segments)
    routed = sum(len(blob) for segment in segments for blob in segment.routing or ())
    stored = len(compress(trajectory_body(_trajectory(segments, name="t", reward=0.0))))
    table.row(
        f"{kind}: routing of a token, and a token in the ledger [bytes]",
        f"{routed / num_tokens:.1f}, {stored / num_tokens:.1f}",
    )


def _ratio(figures: list[float], without: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(figures, without, strict=True))


async def _completed(
    model: Decoder, kind: RoutingReplay, prompts: list[list[int]], num_new: int
) -> tuple[float, list[Segment]]:
    """Return the processor time of all completions [seconds], and what they are for a trainer."""
    context = len(prompts[0]) + num_new
    engine = EmbeddedEngine(
        model,
        EngineConfig(max_running=NUM_SEQUENCES),
        max_context_tokens=context,
        records_routing=kind,
    )

    async def complete(index: int) -> Segment:
        asked = Sampling(
            max_new_tokens=num_new, seed=index, returns_routing_from=None if kind == "none" else 0
        )
        pieces = [
            piece async for piece in engine.stream(prompts[index], asked, session_id=str(index))
        ]
        num_prompt = len(prompts[index])
        routing = [blob for piece in pieces for blob in piece.routing]
        return Segment(
            token_ids=(*prompts[index], *(t for piece in pieces for t in piece.token_ids)),
            is_sampled=(False,) * num_prompt + (True,) * num_new,
            train_mask=(False,) * num_prompt + (True,) * num_new,
            behaviour_logprobs=(*(0.0,) * num_prompt, *(x for p in pieces for x in p.logprobs)),
            policy_versions=(NOT_SAMPLED,) * num_prompt + (0,) * num_new,
            routing=(*routing, b"") if routing else None,
        )

    async with engine:
        started_s = processor_s()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(complete(index)) for index in range(len(prompts))]
        return processor_s() - started_s, [task.result() for task in running]


def _trained(model: Decoder, kind: RoutingReplay, segments: list[Segment]) -> float:
    """Return the processor time of a step on all segments [seconds]."""
    members = tuple(
        _trajectory([segment], name=str(index), reward=float(index % 2))
        for index, segment in enumerate(segments)
    )
    group = Group(
        id="g",
        task_id="t",
        family="f",
        trajectories=members,
        multiplicities=(1,) * len(members),
    )
    batch = Batch(stage="rl", step=0, groups=(group,), trainer_version=0, resets_optimizer=False)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = PolicyTrainer(
            model,
            PolicySettings(
                optimizer=OptimizerConfig(lr=1e-4),
                num_steps=4,
                micro_batch_tokens=4096,
                routing_replay=kind,
            ),
            loss=losses.icepop,
            publish_directory=scratch,
        )
        started_s = processor_s()
        trainer.take_step(batch)
        return processor_s() - started_s


def _trajectory(segments: list[Segment], *, name: str, reward: float) -> Trajectory:
    return Trajectory(
        id=name,
        stage="rl",
        group_id="g",
        task_id="t",
        family="f",
        outcome=Outcome.COMPLETED,
        reward=reward,
        reward_parts={},
        segments=tuple(segments),
        messages=(),
        tools=(),
        num_turns=1,
        difficulty=0.0,
        started_at_s=0.0,
        duration_s=0.0,
    )


if __name__ == "__main__":
    main()
