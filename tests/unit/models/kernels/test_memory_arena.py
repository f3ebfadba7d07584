"""Tensors of an arena: zeros, apart from each other, and alive as long as the arena."""

import torch

from longarc.models.kernels.memory import HUGE_PAGE_BYTES, Arena


def test_tensors_are_zeros_that_do_not_overlap():
    arena = Arena()
    first, second = arena.take(3, 5), arena.take(7)
    first.fill_(1.0)
    assert torch.equal(second, torch.zeros(7))
    assert second.data_ptr() % 64 == 0


def test_what_does_not_fit_the_chunk_gets_one_of_its_own_and_the_old_one_stays():
    arena = Arena()
    address = arena.take(4).fill_(2.0).data_ptr()
    large = arena.take(20 * HUGE_PAGE_BYTES // 4)
    assert large.data_ptr() % HUGE_PAGE_BYTES == 0
    assert any(chunk.data_ptr() == address and chunk[0] == 2.0 for chunk in arena._chunks)
