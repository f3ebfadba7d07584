"""Drafts that are kept follow the main model's distribution, exactly."""

import itertools

import pytest
import torch

from longarc.algos.speculative import (
    acceptance_probability,
    inverse_cdf,
    residual,
    verified,
)


def distributions(*shape, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


@pytest.mark.parametrize("seed", range(8))
def test_one_draft_leaves_the_distribution_as_it_is_in_every_case(seed):
    p, q = distributions(5, seed=seed), distributions(5, seed=100 + seed)
    ids = torch.arange(5)
    accepted = q * acceptance_probability(p.expand(5, 5), q.expand(5, 5), ids)
    refused = 1 - accepted.sum()
    torch.testing.assert_close(accepted + refused * residual(p, q), p, rtol=0, atol=1e-14)
    # The overlap of both distributions is how often a draft is kept.
    torch.testing.assert_close(accepted.sum(), torch.minimum(p, q).sum())


def test_the_joint_distribution_of_several_tokens_is_the_main_models():
    # A main model whose next distribution depends on the tokens before it, and a drafter that knows it badly.
    vocab, depth, num = 3, 2, 400_000
    tables = [distributions(*[vocab] * d, vocab, seed=d) for d in range(depth + 1)]
    drafter = [distributions(*[vocab] * d, vocab, seed=50 + d) for d in range(depth)]
    uniform = torch.rand(num, 2 * depth + 1, generator=torch.Generator().manual_seed(3)).double()
    q0 = drafter[0].expand(num, -1)
    d0 = inverse_cdf(q0, uniform[:, 0])
    q1 = drafter[1][d0]
    d1 = inverse_cdf(q1, uniform[:, 1])
    main = torch.stack([tables[0].expand(num, -1), tables[1][d0], tables[2][d0, d1]], dim=1)
    found = verified(
        main,
        torch.stack([q0, q1], 1),
        torch.stack([d0, d1], 1),
        uniform[:, 2:4],
        uniform[:, 4:].expand(-1, 3),
    )
    assert 0.1 < (found.num_accepted == 2).double().mean() < 0.9
    # Whatever was accepted, the token behind the kept ones follows the main model given those.
    kept = [torch.where(found.num_accepted > i, d, -1) for i, d in enumerate((d0, d1))]
    first = torch.where(kept[0] >= 0, kept[0], found.next_ids)
    counts = torch.bincount(first, minlength=vocab).double()
    assert chi_square(counts, tables[0] * num) < 13.8  # 0.1 % of two degrees of freedom
    for token in range(vocab):
        second = torch.where(kept[1] >= 0, kept[1], found.next_ids)[kept[0] == token]
        counts = torch.bincount(second, minlength=vocab).double()
        assert chi_square(counts, tables[1][token] * len(second)) < 13.8
    for pair in itertools.product(range(vocab), repeat=2):
        third = found.next_ids[(kept[0] == pair[0]) & (kept[1] == pair[1])]
        counts = torch.bincount(third, minlength=vocab).double()
        assert chi_square(counts, tables[2][pair] * len(third)) < 13.8


def chi_square(found, expected):
    return float(((found - expected) ** 2 / expected).sum())


def test_greedy_keeps_what_the_main_model_would_say_and_then_says_it():
    main = torch.zeros(1, 4, 6)
    for position, token in enumerate((2, 5, 1, 3)):
        main[0, position, token] = 1.0
    drafts = torch.tensor([[2, 5, 4]])
    draft = torch.nn.functional.one_hot(drafts, 6).double()
    found = verified(main, draft, drafts, torch.full((1, 3), 0.999), torch.full((1, 4), 0.999))
    assert found.num_accepted.tolist() == [2]
    assert found.next_ids.tolist() == [1]


def test_nothing_drafted_is_plain_sampling():
    main = distributions(4, 1, 7)
    draws = torch.tensor([0.0, 0.3, 0.6, 0.999])
    none = torch.empty(4, 0)
    found = verified(main, torch.empty(4, 0, 7), none.long(), none, draws[:, None])
    assert found.num_accepted.tolist() == [0] * 4
    assert torch.equal(found.next_ids, inverse_cdf(main[:, 0], draws))


def test_equal_distributions_accept_every_draft():
    p = distributions(2000, 3, 9)
    ids = torch.stack([inverse_cdf(p[:, i], torch.linspace(0, 0.999, 2000)) for i in range(2)], 1)
    found = verified(p, p[:, :2], ids, torch.full((2000, 2), 0.9999999), torch.zeros(2000, 3))
    assert found.num_accepted.tolist() == [2] * 2000
    assert torch.equal(residual(p, p), p)


def test_a_token_that_a_distribution_excludes_is_never_kept_or_drawn():
    main = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]])
    draft = torch.tensor([[[0.9, 0.1, 0.0]]])
    for draw in (0.0, 0.5, 0.999999999):
        found = verified(
            main, draft, torch.tensor([[0]]), torch.zeros(1, 1), torch.full((1, 2), draw).double()
        )
        assert found.num_accepted.tolist() == [0]
        assert found.next_ids.tolist() in ([1], [2])
    # A draft outside its own distribution is refused, whatever the main model thinks of it.
    outside = verified(main, draft, torch.tensor([[2]]), torch.zeros(1, 1), torch.zeros(1, 2))
    assert outside.num_accepted.tolist() == [0]


def test_the_number_of_the_place_where_a_chain_ends_is_the_one_that_is_used():
    main, drafts = distributions(3, 3, 9), torch.zeros(3, 2, dtype=torch.long)
    draft = torch.nn.functional.one_hot(drafts, 9).double()
    accepts = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    draws = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)).double()
    found = verified(main, draft, drafts, accepts, draws)
    assert found.num_accepted.tolist() == [0, 1, 2]
    for row, num in enumerate((0, 1, 2)):
        left = main[row, num] if num == 2 else residual(main[row, num], draft[row, num])
        assert found.next_ids[row] == inverse_cdf(left[None], draws[row, num, None])
