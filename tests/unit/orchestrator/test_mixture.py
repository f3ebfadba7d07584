"""Tasks come in exact shares, and position n is the same task in every process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longarc.errors import ConfigError
from longarc.orchestrator.mixture import FamilyShare, Mixture
from stage_fakes import FakeFamily


def mixture(shares, *, position=0, length=None):
    families = [
        FamilyShare(family=FakeFamily(name, length=length), share=share)
        for name, share in shares.items()
    ]
    return Mixture(families, position=position)


@given(
    shares=st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 2.0, 7.5]), min_size=1, max_size=5),
    num_tasks=st.integers(1, 200),
)
def test_after_any_number_of_tasks_each_family_had_its_share_rounded_up_or_down(shares, num_tasks):
    named = {f"family{index}": share for index, share in enumerate(shares)}
    drawn = mixture(named)
    families = [drawn.draw().family for _ in range(num_tasks)]
    for name, share in named.items():
        exact = num_tasks * share / sum(shares)
        assert abs(families.count(name) - exact) < 1 + 1e-9


@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    position=st.integers(0, 60),
    length=st.none() | st.integers(1, 5),
)
def test_a_mixture_that_continues_yields_what_an_uninterrupted_one_would(shares, position, length):
    named = {f"family{index}": share for index, share in enumerate(shares)}
    whole = mixture(named, length=length)
    expected = [whole.draw().id for _ in range(position + 10)][position:]
    resumed = mixture(named, position=position, length=length)
    assert resumed.position == position
    assert [resumed.draw().id for _ in range(10)] == expected


def test_a_family_yields_its_tasks_in_order_and_starts_again_at_its_end():
    drawn = mixture({"a": 1.0}, length=2)
    assert [drawn.draw().id for _ in range(5)] == [f"a/train/{i}" for i in (0, 1, 0, 1, 0)]


def test_no_families_are_refused():
    with pytest.raises(ConfigError, match="at least one family"):
        Mixture([])


def test_two_families_of_one_name_are_refused():
    twice = [FamilyShare(family=FakeFamily("a"), share=1.0)] * 2
    with pytest.raises(ConfigError, match="different names"):
        Mixture(twice)


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_a_share_that_is_no_share_is_refused(share):
    with pytest.raises(ConfigError, match="share"):
        mixture({"a": share})


def test_an_empty_source_is_named():
    with pytest.raises(ConfigError, match=r"'a' has no tasks in split 'train'"):
        mixture({"a": 1.0}, length=0).draw()


def test_a_source_that_raises_is_named_with_the_position():
    class Broken(FakeFamily):
        def tasks(self, split, *, cursor):
            yield from ()
            raise OSError("no such file")

    with pytest.raises(ConfigError, match=r"'fake', task 0 of 'train': OSError: no such file"):
        Mixture([FamilyShare(family=Broken(), share=1.0)]).draw()


def test_a_task_of_another_family_is_refused():
    class Liar(FakeFamily):
        def tasks(self, split, *, cursor):
            return FakeFamily("somebody else").tasks(split, cursor=cursor)

    with pytest.raises(ConfigError, match="family='somebody else'"):
        Mixture([FamilyShare(family=Liar(), share=1.0)]).draw()
