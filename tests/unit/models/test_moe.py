import itertools
import os
from functools import partial

import pytest
import torch

from longarc.models.build import build_model
from longarc.models.layout import Layout
from longarc.models.moe import MixtureOfExperts, Router, update_router_bias
from model_cases import small_glm
from peak_memory import measured_alone, peak_bytes


@pytest.fixture
def mixture(glm):
    return glm.model.layers[1].mlp.double()


def rows(count):
    generator = torch.Generator().manual_seed(8)
    return torch.randn(count, 32, generator=generator, dtype=torch.float64)


def test_the_mixture_is_the_weighted_sum_written_out(mixture: MixtureOfExperts):
    x = rows(40)
    got, _ = mixture(x, 40)

    gate, experts, shared = mixture.gate, mixture.experts, mixture.shared_experts
    for t in range(40):
        score = (gate.weight @ x[t]).sigmoid()
        chosen = (score + gate.e_score_correction_bias).topk(2).indices
        weight = 2.5 * score[chosen] / score[chosen].sum()
        expected = shared(x[t : t + 1])[0]
        for j, expert in enumerate(chosen):
            g, u = (experts.gate_up_proj[expert] @ x[t]).chunk(2)
            expected = expected + weight[j] * (
                experts.down_proj[expert] @ (torch.nn.functional.silu(g) * u)
            )
        torch.testing.assert_close(got[t], expected)


def test_equal_preferences_go_to_the_lower_expert():
    router = Router(small_glm(n_routed_experts=40, num_experts_per_tok=3))
    torch.nn.init.zeros_(router.weight)
    chosen, weight = router(torch.ones(32, 32))
    assert chosen.tolist() == [[0, 1, 2]] * 32
    torch.testing.assert_close(weight.sum(dim=1), torch.full((32,), 2.5))


def test_counts_leave_padding_out(glm, make_ids):
    counts = glm(make_ids(37), Layout.documents([37])).expert_counts
    assert counts.shape == (2, 6)
    assert counts.sum(dim=1).tolist() == [74, 74]


def test_a_model_without_a_shared_expert_runs(make_ids):
    model = build_model(small_glm(n_shared_experts=0), seed=0)
    assert model(make_ids(9), Layout.documents([9])).hidden.isfinite().all()


def test_the_bias_steers_choice_but_not_weight(mixture: MixtureOfExperts):
    x = rows(32)
    mixture.gate.e_score_correction_bias[:] = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, 9.0])
    chosen, weight = mixture.gate(x)
    score = (x @ mixture.gate.weight.T).sigmoid()[:, 4:]
    assert set(chosen.flatten().tolist()) == {4, 5}
    torch.testing.assert_close(
        weight, 2.5 * score.gather(1, chosen - 4) / score.sum(dim=1, keepdim=True)
    )


def test_the_router_bias_moves_towards_balance(glm):
    routers = [layer.mlp.gate for layer in glm.model.layers[1:]]
    before = [router.e_score_correction_bias.clone() for router in routers]
    counts = torch.tensor([[10, 10, 10, 10, 10, 70], [20, 20, 20, 20, 20, 20]])
    update_router_bias(glm, counts, rate=0.01)

    move = routers[0].e_score_correction_bias - before[0]
    torch.testing.assert_close(move[:5], torch.full((5,), 0.01 * (1 - 2 / 3)))
    torch.testing.assert_close(move[5], torch.tensor(0.01 * (-1 - 2 / 3)))
    assert torch.equal(routers[1].e_score_correction_bias, before[1])


def test_balancing_evens_out_a_skewed_router(glm, make_ids):
    ids, layout = make_ids(200), Layout.documents([100, 100])
    first = glm(ids, layout).expert_counts
    for _ in range(25):
        update_router_bias(glm, glm(ids, layout).expert_counts, rate=0.05)
    last = glm(ids, layout).expert_counts
    assert last.amax() < first.amax()
    assert last.amin() > first.amin()


def peaks_of_rounded_experts():
    """Return the size of all experts, and the peaks of steps by kernels and group size [bytes]."""
    shape = {"hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 16}
    model = build_model(small_glm(**shape, num_hidden_layers=6), seed=0)
    ids, layout = torch.arange(64), Layout.documents([64])

    def step(native, group_size):
        os.environ["LONGARC_NATIVE"] = native
        model(ids, layout, int4_group_size=group_size).hidden.sum().backward()

    step("1", None)  # allocates gradients and scratch memory
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    cases = itertools.product("10", [None, 32])
    return experts, {case: peak_bytes(partial(step, *case)) for case in cases}


def test_rounded_experts_are_not_kept_until_backward():
    experts, peaks = measured_alone(peaks_of_rounded_experts)
    assert experts > 60e6
    for native in "10":
        assert peaks[native, 32] < peaks[native, None] + 0.35 * experts  # a layer has 0.2
