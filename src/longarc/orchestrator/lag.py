"""How far sampling may run ahead of training, so that nothing trained is older than the bound.

Let G be ``groups_per_step``, L ``max_lag_steps`` and K ``push_every_steps``. A group that starts while
the trainer is at version v is sampled by weights of version at least ``v - (K - 1)``, because the
engine is refreshed every K steps. If at most ``S = G * (L - K + 2)`` groups are in flight (sampling,
waiting or in training), S - 1 others are in front of it, and it is trained at version at most
``v + (S - 1) // G = v + L - K + 1`` if groups are trained in admission order: its lag is at most L.

S counts groups and not versions, so it is the same after a resume at any version.

Where groups are trained as they become ready, a straggler can be overtaken; ``can_wait`` then says
whether everything left behind still meets its last version, and if not the step waits for it.
"""

from collections.abc import Sequence

from longarc.config.orchestrator import RolloutLoopConfig


def inflight_capacity(config: RolloutLoopConfig) -> int:
    """Return how many groups may be in flight at once [groups].

    In admission order the whole bound is used. In ready order a full pipeline would leave no room
    for a straggler to be overtaken, so by default only half of the steps run ahead.
    """
    if config.max_inflight_groups is not None:
        return config.max_inflight_groups
    if config.consume == "admission":
        return config.inflight_bound
    steps_ahead = config.inflight_bound // config.groups_per_step - 1
    return config.groups_per_step * (1 + (steps_ahead + 1) // 2)


def can_wait(last_versions: Sequence[int], *, version: int, groups_per_step: int) -> bool:
    """Say whether groups left out of the step at ``version`` can all still be trained in time.

    Args:
        last_versions: for each group left out, the last trainer version [optimizer steps] at which
            it may be trained (its oldest token's version plus ``max_lag_steps``).
        version: trainer version [optimizer steps] before the step.
        groups_per_step: how many of them each later step can take.
    """
    return all(
        version + 1 + position // groups_per_step <= last
        for position, last in enumerate(sorted(last_versions))
    )
