import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longarc.engine.slots import _BLOCK_TOKENS, SlotTable, common_prefix, longest_prefix


def ids(*values):
    return np.array(values, dtype=np.int64)


def filled(table, session_id, tokens):
    slot = table.acquire(session_id, None)
    slot.length = 0
    slot.append(tokens)
    table.release(slot)
    return slot


def test_a_common_prefix_ends_at_the_first_difference_or_the_shorter_end():
    assert common_prefix(ids(1, 2, 3), ids(1, 2, 4)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 4)) == 2
    assert common_prefix(ids(), ids(1)) == 0


def test_the_longest_shared_prefix_is_found_but_never_the_whole_prompt():
    table = SlotTable(3, 16)
    filled(table, "a", [1, 2])
    longest = filled(table, "b", [1, 2, 3, 4])
    assert table.donor(ids(1, 2, 3, 4), "c") == (longest, 3)


def test_a_session_goes_on_in_its_own_slot_where_another_holds_the_same():
    table = SlotTable(3, 16)
    filled(table, "other", [1, 2, 3])
    own = filled(table, "mine", [1, 2, 3])
    donor, length = table.donor(ids(1, 2, 3, 9), "mine")
    assert (donor, length) == (own, 3)
    assert table.acquire("mine", donor) is own


def test_a_session_whose_history_changed_takes_the_better_prefix():
    table = SlotTable(3, 16)
    filled(table, "mine", [1, 2, 7, 7])
    better = filled(table, "other", [1, 2, 3, 4])
    assert table.donor(ids(1, 2, 3, 4, 5), "mine") == (better, 4)


def test_a_slot_that_was_given_to_another_session_is_no_longer_the_first_ones():
    table = SlotTable(1, 16)
    filled(table, "first", [1, 2, 3])
    filled(table, "second", [5, 6])
    assert table.donor(ids(1, 2, 3, 4), "first") == (None, 0)


def test_an_empty_slot_is_taken_before_the_least_recently_used_and_the_donor_last():
    table = SlotTable(3, 16)
    oldest, newer = filled(table, "a", [1]), filled(table, "b", [2])
    empty = table.acquire("c", oldest)
    assert empty not in (oldest, newer)
    assert [table.acquire("d", oldest), table.acquire("e", oldest)] == [newer, oldest]
    assert table.acquire("f", None) is None
    table.release(newer)
    table.release(oldest)
    assert table.acquire("g", None) is newer


def test_new_weights_leave_nothing_to_reuse():
    table = SlotTable(2, 16)
    busy = table.acquire("a", None)
    busy.append([1, 2, 3])
    filled(table, "b", [1, 2, 3])
    table.invalidate()
    assert table.donor(ids(1, 2, 3, 4), "a") == (None, 0)
    table.release(busy)
    assert table.donor(ids(1, 2, 3, 4), "a") == (None, 0)


def test_a_prompt_of_one_token_has_nothing_to_reuse():
    table = SlotTable(2, 16)
    filled(table, "a", [1, 2])
    assert table.donor(ids(1), "b") == (None, 0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * _BLOCK_TOKENS),  # where the row differs from the prompt
            st.integers(0, 3 * _BLOCK_TOKENS),  # how much of it counts
        ),
        max_size=6,
    ),
    st.integers(1, 3 * _BLOCK_TOKENS),
    st.integers(0, 3 * _BLOCK_TOKENS),
)
def test_the_longest_prefix_is_the_one_that_comparing_row_by_row_finds(rows, num_tokens, beyond):
    tokens = np.arange(num_tokens, dtype=np.int64)
    table = np.tile(np.arange(3 * _BLOCK_TOKENS, dtype=np.int64), (len(rows), 1))
    for row, (different_from, _) in zip(table, rows, strict=True):
        row[different_from:] = -1
    lengths = np.array([length for _, length in rows], dtype=np.int64)
    beyond = min(beyond, num_tokens - 1)

    shared = [common_prefix(row[:n], tokens) for row, n in zip(table, lengths, strict=True)]
    index, length = longest_prefix(table, lengths, tokens, beyond=beyond)

    if max(shared, default=0) > beyond:
        assert (index, length) == (shared.index(length), max(shared))
    else:
        assert length <= beyond


@given(st.randoms(use_true_random=False))
def test_the_donor_shares_as_much_as_any_slot_that_may_be_used(rng):
    table, busy = SlotTable(4, 300), []
    for _ in range(60):
        prompt = ids(*[1] * rng.choice([0, 5, 140]), *(rng.randint(0, 2) for _ in range(9)))
        session_id = f"s{rng.randint(0, 5)}"
        donor, length = table.donor(prompt, session_id)

        shared = [
            common_prefix(slot.tokens[: slot.length], prompt[:-1])
            for slot in table.slots
            if not slot.is_stale
        ]
        own = table._last_of.get(session_id)
        is_continued = own is not None and not own.is_busy and 0 < own.length == length
        assert length == max(shared, default=0) or (is_continued and donor is own)
        assert donor is None or common_prefix(donor.tokens[: donor.length], prompt[:-1]) == length

        match rng.choice(["start", "start", "end", "weights"]):
            case "start" if (slot := table.acquire(session_id, donor)) is not None:
                slot.length = 0
                slot.append(prompt[: rng.randint(length, len(prompt))])
                busy.append(slot)
            case "end" if busy:
                table.release(busy.pop(rng.randrange(len(busy))))
            case "weights":
                table.invalidate()
