"""MTP losses from hidden states: those of the full table of probabilities, which never exists."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from longarc.algos.mtp import acceptance, end_to_end_tv, expected_accepted, single_step_tv
from longarc.errors import ContractError
from longarc.models.mtp_losses import mtp_acceptance, mtp_cross_entropy

STEPS, ROWS, WIDTH, VOCAB = 3, 17, 6, 11


def inputs(*, steps=STEPS, rows=ROWS, vocab=VOCAB, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(steps, rows, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    main = torch.randn(rows, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    return draft, main, weight, token_ids


def is_in_pack(*, steps=STEPS, rows=ROWS):
    return torch.stack([torch.arange(rows) < rows - 2 - step for step in range(steps)])


def table_of_acceptances(draft, main, weight):
    """From all probabilities: step g of row i is judged by row i + 1 + g."""
    probs = (main @ weight.detach().T).softmax(dim=-1)
    columns = []
    for step in range(len(draft)):
        num = len(main) - 1 - step
        alpha = acceptance(probs[1 + step :], draft[step, :num] @ weight.T)
        columns.append(F.pad(alpha, (0, len(main) - num)))
    return torch.stack(columns)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 512])
def test_acceptance_and_its_gradients_are_those_of_the_table(chunk_tokens):
    draft, main, weight, _ = inputs()
    grad = torch.randn(STEPS, ROWS, generator=torch.Generator().manual_seed(1)).double()
    got = mtp_acceptance(draft, main, weight, chunk_tokens=chunk_tokens)
    expected = table_of_acceptances(draft, main, weight)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(
        torch.autograd.grad(got, [draft, weight], grad),
        torch.autograd.grad(expected, [draft, weight], grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("loss", [single_step_tv, end_to_end_tv], ids=["single", "end_to_end"])
def test_the_gradient_of_both_tv_losses_is_that_of_their_value(loss):
    draft, main, weight, _ = inputs(rows=7)

    def mean(draft):
        alpha = mtp_acceptance(draft, main, weight.detach(), chunk_tokens=3)
        return loss(alpha, is_in_pack(rows=7)).sum()

    assert torch.autograd.gradcheck(mean, draft)


def test_the_main_model_gets_no_gradient():
    draft, main, weight, _ = inputs()
    main.requires_grad_()
    mtp_acceptance(draft, main, weight).sum().backward()
    assert main.grad is None


def test_more_steps_than_rows_accept_nothing_behind_the_end():
    draft, main, weight, _ = inputs(steps=4, rows=3)
    alpha = mtp_acceptance(draft, main, weight)
    assert (alpha > 0).tolist() == [
        [True, True, False],
        [True, False, False],
        [False] * 3,
        [False] * 3,
    ]


def test_a_step_behind_an_invalid_one_does_not_count():
    alpha = torch.full((3, 4), 0.5, dtype=torch.float64)
    is_valid = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1]], dtype=torch.bool)
    assert expected_accepted(alpha, is_valid).tolist() == [0.875, 0.5, 0.75, 0.0]
    lost = [1 - 0.875 / 3, 1 - 0.5 / 3, 0.75, 0.0]
    assert end_to_end_tv(alpha, is_valid).tolist() == pytest.approx(lost)
    assert single_step_tv(alpha, is_valid).sum().item() == 0.5 * 9


def test_invalid_steps_have_no_gradient_even_if_they_are_not_numbers():
    alpha = torch.tensor([[0.5], [float("nan")]], dtype=torch.float64, requires_grad=True)
    is_valid = torch.tensor([[True], [False]])
    (end_to_end_tv(alpha, is_valid).sum() + single_step_tv(alpha, is_valid).sum()).backward()
    assert alpha.grad.tolist() == [[-1.5], [0.0]]


@pytest.mark.parametrize("chunk_tokens", [4, 512])
def test_cross_entropy_and_its_gradients_are_those_of_the_table(chunk_tokens):
    draft, _, weight, token_ids = inputs()
    is_valid = is_in_pack()
    is_valid[1, 4] = False
    got = mtp_cross_entropy(draft, weight, token_ids, is_valid, chunk_tokens=chunk_tokens)
    expected = torch.zeros_like(got)
    for step in range(STEPS):
        for row in range(ROWS):
            if is_valid[step, row]:
                target = token_ids[row + 2 + step]
                expected[step, row] = F.cross_entropy(weight @ draft[step, row], target)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(
        torch.autograd.grad(got.sum(), [draft, weight]),
        torch.autograd.grad(expected.sum(), [draft, weight]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_valid_step_without_a_token_is_refused():
    draft, _, weight, token_ids = inputs()
    with pytest.raises(ContractError, match=r"i \+ 2 \+ g"):
        mtp_cross_entropy(draft, weight, token_ids, torch.ones(STEPS, ROWS, dtype=torch.bool))


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest tensor holds that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_probabilities_of_all_tokens_never_exist_at_once():
    draft, main, weight, token_ids = inputs(rows=900, vocab=300, dtype=torch.float32)
    is_valid = is_in_pack(rows=900)
    with LargestTensor() as largest:
        alpha = mtp_acceptance(draft, main, weight, chunk_tokens=32)
        entropy = mtp_cross_entropy(draft, weight, token_ids, is_valid, chunk_tokens=32)
        (end_to_end_tv(alpha, is_valid).sum() + entropy.sum()).backward()
    assert largest.numel <= 64 * 300 < 900 * 300 // 10
