"""Whatever a document holds, reading it gives trajectories that can be stored, or a typed error."""

import contextlib
import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from ledger_cases import make_trajectory
from longarc.errors import ContractError
from longarc.runs.atif import trajectory_to_atif
from longarc.runs.atif_import import trajectories_from_atif
from longarc.runs.codec import trajectory_body

STRANGE = st.sampled_from(
    [None, True, -1, 2**40, 0.5, float("nan"), "", "\ud800", "longarc", [], [[]], {}, {"a": 1}]
)


def places(value, path=()):
    """Yield where anything stands in a JSON value."""
    if path:
        yield path
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in inside:
        yield from places(inner, (*path, key))


def changed(document, path, how):
    *above, last = path
    holder = document
    for key in above:
        holder = holder[key]
    if how == "drop":
        del holder[last]
    else:
        holder[last] = how


def foreign():
    document = trajectory_to_atif(make_trajectory())
    del document["extra"]
    inner = copy.deepcopy(document)
    document["subagent_trajectories"] = [inner]
    return document


BASES = {"ours": trajectory_to_atif(make_trajectory()), "foreign": foreign()}
PLACES = {name: list(places(document)) for name, document in BASES.items()}


@st.composite
def documents(draw):
    name = draw(st.sampled_from(sorted(BASES)))
    document = copy.deepcopy(BASES[name])
    for path in draw(st.lists(st.sampled_from(PLACES[name]), min_size=1, max_size=3)):
        # What an earlier change took away cannot be changed again.
        with contextlib.suppress(KeyError, IndexError, TypeError):
            changed(document, path, copy.deepcopy(draw(st.just("drop") | STRANGE)))
    return document


@given(documents())
@settings(max_examples=500, deadline=None)
def test_a_damaged_document_is_read_as_far_as_it_goes_or_refused(document):
    try:
        read = trajectories_from_atif(document, name="x")
    except ContractError:
        return
    for trajectory in read:
        trajectory_body(trajectory)
