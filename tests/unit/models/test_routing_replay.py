"""Routing that one pass recorded, replayed by another: the same bits, gradients, and what a close call costs."""

from dataclasses import replace

import pytest
import torch

from longarc.config.stages import ActivationConfig
from longarc.errors import ContractError
from longarc.models.activations import Activations
from longarc.models.build import build_model
from longarc.models.layout import Layout, Span
from longarc.models.projection import token_logprobs
from longarc.models.routing import Routing
from model_cases import sharpened, small_glm, small_llama

NO_KEY = -1
PACKS = {
    "documents": Layout.documents([40, 7, 30]),
    "a shared prompt": Layout((Span(30), Span(12, 0), Span(20, 0), Span(15))),
}
CONFIGS = {
    "glm": small_glm(),
    "shared indexers": small_glm(num_hidden_layers=4, index_topk_pattern="FSFS"),
    "weights as they are": small_glm(norm_topk_prob=False, routed_scaling_factor=1.7),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    return sharpened(build_model(CONFIGS[request.param], seed=3))


@pytest.fixture(params=PACKS)
def layout(request):
    return PACKS[request.param]


@pytest.fixture(params=["native", "eager"])
def path(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")


def ids_of(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (layout.num_tokens,), generator=generator)


def logprobs_of(model, ids, output):
    return token_logprobs(output.hidden[:-1], model.output_weight, ids[1:])[0]


def perturbed(model, *, amount=0.02):
    """Return the model with numbers that differ a little, as another implementation's do."""
    other = build_model(model.config, seed=0)
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + amount * torch.randn(parameter.shape, generator=generator))
    return other


def assert_equal(first, second):
    for one, other in ((first.experts, second.experts), (first.keys, second.keys)):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("path")
def test_a_replayed_pass_gives_the_same_bits_and_the_same_gradients(model, layout):
    ids = ids_of(layout)
    first = model(ids, layout, records_routing=True)
    logprobs_of(model, ids, first).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    second = model(ids, layout, replayed=first.routing, records_routing=True)
    logprobs_of(model, ids, second).sum().backward()
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.expert_counts, second.expert_counts)
    assert_equal(first.routing, second.routing)
    assert any("gate.weight" in name for name in gradients)
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert torch.equal(gradients[name], parameter.grad), name


def test_what_is_recorded_is_what_each_token_used(model, layout):
    ids = ids_of(layout)
    routing = model(ids, layout, records_routing=True).routing
    config = model.config
    counts = model(ids, layout).expert_counts
    for layer, chosen in enumerate(routing.experts):
        assert torch.equal(
            torch.bincount(chosen.flatten(), minlength=config.n_routed_experts), counts[layer]
        )
    assert len(routing.keys) == len(config.indexed_layers)
    for position, keys in zip(layout.position_ids().tolist(), routing.keys[0], strict=True):
        found = keys[keys != NO_KEY]
        assert len(found) == min(position + 1, config.num_selected)
        assert int(found.max()) <= position
        if position < config.num_selected:  # all there are
            assert found.tolist() == list(range(position + 1))


@pytest.mark.usefixtures("path")
def test_other_numbers_choose_otherwise_and_replayed_choices_leave_a_smaller_mismatch(
    model, layout
):
    ids = ids_of(layout)
    other = perturbed(model)
    with torch.no_grad():
        engine = other(ids, layout, records_routing=True)
        recorded = engine.routing
        free = model(ids, layout, records_routing=True)
        replayed = model(ids, layout, replayed=recorded, records_routing=True)
        behaviour = logprobs_of(other, ids, engine)
        mismatch = (logprobs_of(model, ids, free) - behaviour).abs().mean()
        left = (logprobs_of(model, ids, replayed) - behaviour).abs().mean()
    assert_equal(replayed.routing, recorded)
    assert not torch.equal(free.routing.experts, recorded.experts)
    assert not torch.equal(free.routing.keys, recorded.keys)
    assert left < mismatch


@pytest.mark.parametrize("part", ["experts", "keys"])
def test_experts_or_keys_may_be_replayed_alone(model, layout, part):
    ids = ids_of(layout)
    recorded = perturbed(model)(ids, layout, records_routing=True).routing
    alone = replace(Routing(), **{part: getattr(recorded, part)})
    found = model(ids, layout, replayed=alone, records_routing=True).routing
    assert torch.equal(getattr(found, part), getattr(recorded, part))


def test_a_layer_that_is_computed_again_in_backward_replays_too(model, layout):
    ids = ids_of(layout)
    routing = perturbed(model)(ids, layout, records_routing=True).routing

    def gradients(**settings):
        model.zero_grad()
        with Activations(ActivationConfig(**settings)) as activations:
            output = model(ids, layout, replayed=routing, activations=activations)
            logprobs_of(model, ids, output).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for kept, computed in zip(gradients(), gradients(recomputed_layers="all"), strict=True):
        assert torch.equal(kept, computed)


def changed(routing, part, place, value):
    tensor = getattr(routing, part).clone()
    tensor[place] = value
    return replace(routing, **{part: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: Routing(experts=r.experts[:, 1:]), r"experts has shape .* the pass needs"),
        (lambda r: replace(r, keys=r.keys[1:]), r"keys has shape .* the pass needs"),
        (
            lambda r: changed(r, "experts", (0, 0, 0), 6),
            r"span 0\.\.6, but the model has .* 0\.\.5",
        ),
        (
            lambda r: changed(r, "experts", (0, 0), r.experts[0, 0, 0]),
            r"an expert twice for one token",
        ),
        (lambda r: changed(r, "keys", (0, 3, 0), 4), r"ascending positions up to each token's own"),
        (lambda r: changed(r, "keys", (0, 3, 1), 0), r"ascending positions up to each token's own"),
        (lambda r: changed(r, "keys", (0, 3), NO_KEY), r"at least one"),
    ],
)
def test_a_routing_that_cannot_have_been_is_refused(change, message):
    model = sharpened(build_model(small_glm(), seed=3))
    layout = PACKS["documents"]
    ids = ids_of(layout)
    routing = model(ids, layout, records_routing=True).routing
    with pytest.raises(ContractError, match=message):
        model(ids, layout, replayed=change(routing))


def test_models_and_attention_without_such_choices_refuse_them():
    layout = PACKS["documents"]
    ids = ids_of(layout)
    llama = build_model(small_llama(), seed=0)
    with pytest.raises(ContractError, match="routing of a llama model cannot be recorded"):
        llama(ids, layout, records_routing=True)
    glm = sharpened(build_model(small_glm(), seed=3))
    routing = glm(ids, layout, records_routing=True).routing
    with pytest.raises(ContractError, match="do not go with attention='dense'"):
        glm(ids, layout, replayed=routing, attention="dense")
    dense = glm(ids, layout, attention="dense", records_routing=True)
    assert dense.routing.keys is None
    again = glm(ids, layout, replayed=dense.routing, attention="dense")
    assert torch.equal(again.hidden, dense.hidden)
