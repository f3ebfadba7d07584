"""Which data may be trained on. Plain Python, so that the control plane can use it without torch."""

import statistics
from collections.abc import Sequence

from longarc.errors import ConfigError


def is_stale(policy_versions: Sequence[int], *, current_version: int, max_lag_steps: int) -> bool:
    """Say whether ``w' - w_0 > tau``: the oldest token decides, and equality is kept.

    Source: GLM-5 (arXiv:2602.15763) section 4.1.2.

    Args:
        policy_versions: weight version [optimizer steps] of each sampled token; none sampled is fresh.
        current_version: version of the weights about to be trained.
        max_lag_steps: tau [optimizer steps].
    """
    return current_version - min(policy_versions, default=current_version) > max_lag_steps


def repair_group(valid_indices: Sequence[int], *, group_size: int) -> tuple[int, ...] | None:
    """Return the members that stand for a whole group, or None to drop it: kept iff ``2 n_valid > G``.

    Valid members are then repeated round-robin in their order, up to ``group_size``.

    Source: GLM-5 (arXiv:2602.15763) section 4.1.2; the order of repetition is LongArc's.
    """
    if 2 * len(valid_indices) <= group_size:
        return None
    return tuple(valid_indices[i % len(valid_indices)] for i in range(group_size))


def is_zero_variance(rewards: Sequence[float], *, eps: float = 1e-6) -> bool:
    """Say whether ``std(R) <= eps`` (ddof 1): rewards are all alike, and the group carries no gradient.

    The same test as in :func:`longarc.algos.advantages.group_advantages`. A group of one is always
    alike.

    Source: dynamic sampling, DAPO (arXiv:2503.14476).
    """
    return len(rewards) < 2 or statistics.stdev(rewards) <= eps


def is_in_difficulty_window(rewards: Sequence[float], *, low: float, high: float) -> bool:
    """Say whether ``low <= mean reward <= high``, so that a group is neither solved nor hopeless.

    With rewards of 0 and 1 the mean is the share of members that solved the task. Dynamic sampling is the window that
    leaves out 0 and 1 alone.

    Source: difficulty filters of GLM-5 (arXiv:2602.15763) section 3.2 and of the curriculum sampling of GLM-4.5V
    (arXiv:2507.01006); their thresholds are not published.

    Args:
        rewards: of the members of a group; a group without any is outside.
        low: smallest mean that is kept.
        high: largest mean that is kept.

    Raises:
        ConfigError: the window is empty.
    """
    check_window(low, high)
    return bool(rewards) and low <= statistics.fmean(rewards) <= high


def check_window(low: float, high: float) -> None:
    """Refuse a window that no mean reward is in.

    Raises:
        ConfigError: names both ends.
    """
    if not low <= high:
        raise ConfigError(
            f"low={low}, high={high} is an empty window of mean rewards; choose low <= high, 0.1 and 0.9 for instance"
        )
