import numpy as np

from longarc.engine.slots import SlotTable, common_prefix


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


def test_new_weights_leave_nothing_to_reuse():
    table = SlotTable(2, 16)
    busy = table.acquire("a", None)
    busy.append([1, 2, 3])
    filled(table, "b", [1, 2, 3])
    table.invalidate()
    assert table.donor(ids(1, 2, 3, 4), "a") == (None, 0)
    table.release(busy)
    assert table.donor(ids(1, 2, 3, 4), "a") == (None, 0)
