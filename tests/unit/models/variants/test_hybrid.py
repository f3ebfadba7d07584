"""Every kind of layer, in one model: packing, sharing, decoding, gradients."""

import pytest
import torch
from hybrid_cases import hybrid, spread

from longarc.config.model import AttentionPattern, GlmHybridConfig, LlamaConfig
from longarc.errors import ConfigError, ContractError
from longarc.models.build import build_model
from longarc.models.conversion import num_new_parameters, to_hybrid
from longarc.models.hf_config import config_to_hf
from longarc.models.layout import Layout, Span
from longarc.models.variants.memory import HybridCache
from model_cases import YARN, replay_in_random_company, sharpened, small_glm, small_llama


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layers", ["S", "G", "D", "FSGD"])
def test_a_shared_prompt_gives_what_separate_prompts_give(base, layers, make_ids):
    decoder = hybrid(base, layers).double()
    prompt, answers, other = make_ids(20), [make_ids(15), make_ids(9)], make_ids(17)
    follow_up = make_ids(6)
    pieces = [prompt, answers[0], other, answers[1], follow_up]
    shared = Layout((Span(20), Span(15, 0), Span(17), Span(9, 0), Span(6, 1)))
    weights = torch.randn(67, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = weights.split([len(p) for p in pieces])

    together = decoder(torch.cat(pieces), shared).hidden
    (together * weights).sum().backward()
    shared_gradients = {name: grad.clone() for name, grad in gradients(decoder).items()}
    trained = {name for name, _ in decoder.named_parameters()} - {"lm_head.weight"}
    assert shared_gradients.keys() == trained

    decoder.zero_grad()
    first = decoder(torch.cat([prompt, answers[0], follow_up]), Layout.documents([41])).hidden
    second = decoder(torch.cat([prompt, answers[1], other]), Layout.documents([29, 17])).hidden
    apart = torch.cat([first[:35], second[29:], second[20:29], first[35:]])
    (apart * torch.cat(weight)).sum().backward()

    torch.testing.assert_close(together, apart, rtol=0, atol=1e-10)
    for name, grad in gradients(decoder).items():
        torch.testing.assert_close(shared_gradients[name], grad, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("path", ["native", "eager"])
def test_decoding_in_any_company_agrees_with_one_forward_pass(decoder, path, make_ids, monkeypatch):
    if path == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")
    documents = [make_ids(length) for length in (50, 21, 14, 1)]
    packed = decoder(torch.cat(documents), Layout.documents(map(len, documents))).hidden
    replayed = torch.cat(replay_in_random_company(decoder, documents, seed=4))
    torch.testing.assert_close(replayed, packed, rtol=0, atol=2e-4)


def test_in_double_precision_decoding_is_the_forward_pass(decoder, make_ids):
    decoder.double()
    documents = [make_ids(length) for length in (50, 33, 7)]
    packed = decoder(torch.cat(documents), Layout.documents(map(len, documents))).hidden
    replayed = torch.cat(replay_in_random_company(decoder, documents, seed=2))
    torch.testing.assert_close(replayed, packed, rtol=0, atol=1e-10)


def test_the_native_path_computes_what_the_eager_one_does(decoder, make_ids, monkeypatch):
    ids, layout = make_ids(60), Layout((Span(30), Span(20, 0), Span(10)))
    weights = torch.randn(60, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for setting in ("1", "0"):
        monkeypatch.setenv("LONGARC_NATIVE", setting)
        decoder.zero_grad()
        hidden = decoder(ids, layout).hidden
        (hidden * weights).sum().backward()
        results.append({"hidden": hidden.detach(), **gradients(decoder)})
    for name, value in results[0].items():
        other = results[1][name]
        torch.testing.assert_close(value, other, rtol=0, atol=2e-4 * float(other.abs().amax()))


@pytest.mark.parametrize("layers", ["FSGD", "SSSS"])
def test_a_broken_document_does_not_touch_its_neighbours(base, layers, make_ids):
    decoder = hybrid(base, layers)
    decoder.model.embed_tokens.weight.data[63] = float("nan")
    document = make_ids(40).clamp_max(62)
    alone = decoder(document, Layout.documents([40])).hidden
    ids = torch.cat([torch.full((20,), 63), document, torch.full((9,), 63)])
    packed = decoder(ids, Layout.documents([20, 40, 9])).hidden
    assert alone.isfinite().all()
    torch.testing.assert_close(packed[20:60], alone, rtol=0, atol=1e-4)
    assert packed[:20].isnan().all()


def test_no_token_sees_the_future(decoder, make_ids):
    ids = make_ids(50)
    changed = ids.clone()
    changed[30:] = (changed[30:] + 1) % 64
    before = decoder(ids, Layout.documents([50])).hidden
    after = decoder(changed, Layout.documents([50])).hidden
    torch.testing.assert_close(before[:30], after[:30], rtol=0, atol=1e-4)
    assert not torch.allclose(before[30:], after[30:], atol=1e-2)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_the_size_of_chunks_does_not_matter(base, chunk_tokens, make_ids):
    ids, layout = make_ids(60), Layout((Span(30), Span(20, 0), Span(10)))
    expected = hybrid(base, "GD").double()(ids, layout).hidden
    found = hybrid(base, "GD", chunk_tokens=chunk_tokens).double()(ids, layout).hidden
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_window_longer_than_the_text_is_full_attention(base, make_ids):
    ids, layout = make_ids(60), Layout.documents([60])
    full = hybrid(base, "FF").double()(ids, layout).hidden
    wide = hybrid(base, "SS", window=60).double()(ids, layout).hidden
    torch.testing.assert_close(wide, full, rtol=0, atol=1e-10)


SWITCHES = [{n: True} for n, field in LlamaConfig.model_fields.items() if field.annotation is bool]


@pytest.mark.parametrize(
    "switch",
    [*SWITCHES, {"attention_bias": "inputs"}, {"attention_bias": "all"}, {"rope_scaling": YARN}],
    ids=str,
)
def test_every_kind_of_llama_has_windows_too(switch, make_ids):
    """A switch that the attention of every layer obeys must not be forgotten in the variants."""
    config = small_llama(**switch)
    model = sharpened(spread(build_model(config, seed=3))).double()
    ids, layout = make_ids(40), Layout.documents([40])
    wide = to_hybrid(model, AttentionPattern(layers="SS", window=40))
    assert wide.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(
        wide(ids, layout).hidden, model(ids, layout).hidden, rtol=0, atol=1e-10
    )


def test_what_left_the_window_is_not_seen(base, make_ids):
    decoder = hybrid(base, "S", window=9)
    ids = make_ids(50)
    changed = ids.clone()
    changed[10] = (changed[10] + 1) % 64
    difference = (
        (
            decoder(ids, Layout.documents([50])).hidden
            - decoder(changed, Layout.documents([50])).hidden
        )
        .abs()
        .amax(dim=1)
    )
    assert (difference[10:19] > 1e-4).all()
    assert (difference[19:] < 1e-5).all()


def test_rotating_queries_and_keys_matters_to_the_delta_rule(base, make_ids):
    ids, layout = make_ids(30), Layout.documents([30])
    plain = hybrid(base, "D")(ids, layout).hidden
    rotated = hybrid(base, "D", rotates_delta=True)(ids, layout).hidden
    assert (plain - rotated).abs().amax() > 0.01


def test_a_copied_prefix_is_as_good_as_a_computed_one(decoder, make_ids):
    prompt, answers = make_ids(30), [make_ids(20), make_ids(20)]
    cache = decoder.new_cache(4, 64)
    decoder.extend(make_ids(60), [0], [0], [60], cache)  # leaves stale rows and memories behind
    decoder.extend(prompt, [3], [0], [30], cache)
    cache.copy_prefix(3, 0, 30)
    shared = decoder.extend(torch.cat(answers), [3, 0], [30, 30], [20, 20], cache)
    for answer, got in zip(answers, shared.split(20), strict=True):
        fresh = decoder.new_cache(1, 64)
        whole = decoder.extend(torch.cat([prompt, answer]), [0], [0], [50], fresh)
        torch.testing.assert_close(got, whole[30:], rtol=0, atol=2e-4)


def test_a_memory_says_that_it_cannot_go_back(decoder, make_ids):
    cache = decoder.new_cache(2, 64)
    decoder.extend(make_ids(30), [1], [0], [30], cache)
    assert (cache.reusable(1, 30), cache.reusable(1, 20)) == (30, 0)
    with pytest.raises(ContractError, match="stand at position 30, not at 20"):
        cache.copy_prefix(1, 0, 20)
    with pytest.raises(ContractError, match=r"slot 1 stands at position 30, but .* start at 20"):
        decoder.extend(make_ids(4), [1], [20], [4], cache)


def test_rows_can_go_back(base, make_ids):
    """Layers that attend keep every row, so without a memory any prefix can be continued."""
    decoder = hybrid(base, "FS")
    ids = make_ids(40)
    cache = decoder.new_cache(2, 64)
    decoder.extend(torch.cat([ids[:30], make_ids(9)]), [1], [0], [39], cache)
    assert cache.reusable(1, 30) == 30
    cache.copy_prefix(1, 0, 30)
    rest = decoder.extend(ids[30:], [0], [30], [10], cache)
    whole = decoder(ids, Layout.documents([40])).hidden
    torch.testing.assert_close(rest, whole[30:], rtol=0, atol=1e-4)


def test_a_pass_that_failed_leaves_no_memory_to_go_on_from(decoder, make_ids):
    cache = decoder.new_cache(1, 64)
    decoder.extend(make_ids(10), [0], [0], [10], cache)
    norm, decoder.model.norm = decoder.model.norm, None
    with pytest.raises(TypeError):
        decoder.extend(make_ids(5), [0], [10], [5], cache)
    decoder.model.norm = norm
    with pytest.raises(ContractError, match="slot 0 stands at"):
        decoder.extend(make_ids(5), [0], [10], [5], cache)
    decoder.extend(make_ids(5), [0], [0], [5], cache)


def test_another_models_cache_is_refused(decoder, make_ids):
    other = build_model(small_glm(), seed=0).new_cache(1, 16)
    with pytest.raises(ContractError, match="its new_cache"):
        decoder.extend(make_ids(4), [0], [0], [4], other)


def test_layers_with_a_memory_take_no_rows(base):
    cache = hybrid(base, "GDFS").new_cache(2, 64)
    assert isinstance(cache, HybridCache)
    name = next(iter(hybrid(base, "FF").cache_widths()))
    with pytest.raises(KeyError):
        cache.table(name, 0)
    assert cache.table(name, 3).shape[0] == 2 * 64


@pytest.mark.parametrize("layers", ["FFFF", "SFSF", "SSSS"])
def test_conversion_to_attention_keeps_every_weight(base, layers, make_ids):
    config = (small_glm if base == "glm" else small_llama)(num_hidden_layers=4)
    model = sharpened(build_model(config, seed=3))
    ids, layout = make_ids(30), Layout.documents([30])
    converted = to_hybrid(model, AttentionPattern(layers=layers, window=40))
    assert num_new_parameters(converted) == 0
    expected = model(ids, layout, attention="dense").hidden
    torch.testing.assert_close(converted(ids, layout).hidden, expected, rtol=0, atol=1e-4)


def test_simple_gdn_has_no_parameter_of_its_own_and_gdn_has_some(base):
    config = (small_glm if base == "glm" else small_llama)(num_hidden_layers=2)
    model = build_model(config, seed=3)
    simple = to_hybrid(model, AttentionPattern(layers="DD"))
    gated = to_hybrid(model, AttentionPattern(layers="DG"), seed=1)
    assert num_new_parameters(simple) == 0
    assert num_new_parameters(gated) > 0
    again = to_hybrid(gated, AttentionPattern(layers="DG"), seed=2)
    for name, value in gated.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_new_parameters_depend_on_the_seed_alone(base):
    config = (small_glm if base == "glm" else small_llama)(num_hidden_layers=1)
    model = build_model(config, seed=3)
    first, same, other = (
        to_hybrid(model, AttentionPattern(layers="G"), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    name = "model.layers.0.self_attn.delta.dt_bias"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])


def test_new_convolutions_change_nothing_yet_and_new_decays_are_slow(base):
    config = (small_glm if base == "glm" else small_llama)(num_hidden_layers=1)
    delta = (
        to_hybrid(build_model(config, seed=3), AttentionPattern(layers="G"))
        .model.layers[0]
        .self_attn.delta
    )
    assert (delta.conv_weight[:, :-1] == 0).all()
    assert (delta.conv_weight[:, -1] == 1).all()
    step = torch.nn.functional.softplus(delta.dt_bias)
    assert ((step > 0.9e-3) & (step < 0.11)).all()
    assert ((delta.a_log.exp() >= 1) & (delta.a_log.exp() <= 16)).all()


def test_a_pattern_of_another_length_is_refused():
    with pytest.raises(ValueError, match="names 2 layers, but num_hidden_layers=4"):
        GlmHybridConfig(pattern=AttentionPattern(layers="FS"))


@pytest.mark.parametrize("layers", ["", "FX"])
def test_letters_without_a_meaning_are_refused(layers):
    with pytest.raises(ValueError, match=r"pattern|at least 1"):
        AttentionPattern(layers=layers)


def test_transformers_has_no_name_for_a_hybrid(decoder):
    with pytest.raises(ConfigError, match="has no Hugging Face architecture"):
        config_to_hf(decoder.config, dtype="float32")
