from itertools import combinations

import pytest

from longarc.algos.pattern_search import beam_search
from longarc.errors import ContractError


def worth(weights):
    """Score a pattern by what its full layers are worth."""
    return lambda layers: float(
        sum(w for w, letter in zip(weights, layers, strict=True) if letter == "F")
    )


def test_where_layers_do_not_interact_the_least_worthy_are_converted():
    steps = beam_search(6, worth([5, 1, 4, 2, 6, 3]), num_converted=3, beam=1)
    assert steps[-1].kept[0].layers == "FSFSFS"
    assert [step.num_scored for step in steps] == [6, 5, 4]


def test_a_wide_beam_finds_what_a_greedy_search_misses():
    def score(layers):
        """Layers 0 and 1 can go together; alone, each is missed more than layer 2 or 3."""
        return {"SSFF": 1.0, "FFSF": 0.9, "FFFS": 0.9, "SFFF": 0.5, "FSFF": 0.5}.get(layers, 0.0)

    greedy = beam_search(4, score, num_converted=2, beam=1)
    wide = beam_search(4, score, num_converted=2, beam=4)
    pairs = beam_search(4, score, num_converted=2, beam=1, layers_per_step=2)
    assert greedy[-1].kept[0].score == 0.0
    assert wide[-1].kept[0].layers == pairs[-1].kept[0].layers == "SSFF"


def test_a_beam_that_keeps_everything_is_exhaustive():
    seen = []

    def score(layers):
        seen.append(layers)
        return worth([3, 1, 4, 1, 5])(layers)

    steps = beam_search(5, score, num_converted=2, beam=100)
    all_pairs = {
        "".join("S" if i in pair else "F" for i in range(5)) for pair in combinations(range(5), 2)
    }
    assert {pattern.layers for pattern in steps[-1].kept} == all_pairs
    assert len(seen) == len(set(seen)) == 5 + 10


def test_the_last_step_converts_what_is_left():
    steps = beam_search(5, worth([1] * 5), num_converted=3, beam=2, layers_per_step=2)
    assert [step.kept[0].layers.count("S") for step in steps] == [2, 3]


def test_equal_scores_keep_earlier_layers():
    steps = beam_search(4, lambda layers: 0.0, num_converted=2, beam=2)
    assert [pattern.layers for pattern in steps[-1].kept] == ["SSFF", "SFSF"]


def test_candidates_can_be_limited_and_are_then_spread_over_all():
    seen = []
    beam_search(
        6,
        lambda layers: seen.append(layers) or 0.0,
        num_converted=2,
        beam=1,
        layers_per_step=2,
        max_candidates=3,
    )
    assert seen == ["SSFFFF", "FSSFFF", "FFSFSF"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_converted": 5}, "num_converted=5 is out of range; choose 1 to 4"),
        ({"num_converted": 0}, "num_converted=0"),
        ({"beam": 0}, "beam=0 is out of range; choose at least 1"),
        ({"layers_per_step": 5}, "layers_per_step=5"),
        ({"max_candidates": 0}, "max_candidates=0"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ContractError, match=message):
        beam_search(4, lambda _: 0.0, **({"num_converted": 2, "beam": 2} | changes))


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ContractError, match="score of SFFF is not a number"):
        beam_search(4, lambda _: float("nan"), num_converted=1, beam=1)
