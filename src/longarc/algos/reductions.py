"""How much each trained token counts: the weight it has in a loss's sum and in its normaliser.

A step divides once, by the sum of the weights of all its tokens on all ranks. No reduction depends on how the step was
split into micro-batches. Plain Python, so that it needs no torch.
"""

from collections.abc import Sequence
from typing import Literal

from longarc.errors import ContractError

Reduction = Literal["token_mean", "sequence_mean", "segment_mean", "group_mean"]
"""What counts alike: tokens, trajectories, segments or groups."""


def token_weights(
    segment_lengths: Sequence[Sequence[int]],
    multiplicities: Sequence[int],
    *,
    reduction: Reduction,
) -> list[list[float]]:
    """Return ``m_i / n`` for the tokens of each segment of each trajectory of one group.

    ``m_i`` is how often the trajectory stands in the group, and ``n`` is 1, or the trained tokens of what counts once:

    * ``token_mean``: n = 1, every token of the step counts alike. GLM-5 (arXiv:2602.15763) eq. 3, DAPO
      (arXiv:2503.14476) over the whole batch, CompactionRL (arXiv:2607.05378) eq. 12.
    * ``sequence_mean``: n = |y_i| over all segments of the trajectory, ``1/G sum_i 1/|y_i| sum_t``. GLM-5 eq. 1, GRPO
      (arXiv:2402.03300).
    * ``segment_mean``: n = tokens of the segment. A compacted rollout then counts once for each of its segments, and
      a short summary as much as a long one; CompactionRL measures what that costs (66.8 against 60.0).
    * ``group_mean``: n = sum_i m_i |y_i|, so that every group counts alike, ``1/sum_i |y_i|`` per prompt as DAPO
      and CISPO (arXiv:2506.13585) write it.

    Source: GLM-5 (arXiv:2602.15763) eq. 1 and 3, GRPO (arXiv:2402.03300), DAPO (arXiv:2503.14476) and CompactionRL
    (arXiv:2607.05378) eq. 12, as said above.

    Args:
        segment_lengths: trained tokens [tokens] of each segment of each trajectory of the group.
        multiplicities: how often each trajectory stands in the group.
        reduction: what counts alike.

    Returns:
        The weight of each token of the segment; 0 for a segment without trained tokens.

    Raises:
        ContractError: the two lists are not of one length.
    """
    if len(segment_lengths) != len(multiplicities):
        raise ContractError(
            f"{len(segment_lengths)} trajectories but {len(multiplicities)} multiplicities; one for each is needed"
        )
    pairs = list(zip(segment_lengths, multiplicities, strict=True))
    in_group = sum(multiplicity * sum(lengths) for lengths, multiplicity in pairs)
    weights = []
    for lengths, multiplicity in pairs:
        counted_once = {
            "token_mean": [1] * len(lengths),
            "sequence_mean": [sum(lengths)] * len(lengths),
            "segment_mean": lengths,
            "group_mean": [in_group] * len(lengths),
        }[reduction]
        weights.append(
            [
                multiplicity / num_tokens if length else 0.0
                for length, num_tokens in zip(lengths, counted_once, strict=True)
            ]
        )
    return weights
