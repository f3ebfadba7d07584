import pytest
import torch

from longarc.errors import ContractError
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from model_cases import replay_in_random_company


@pytest.mark.parametrize("path", ["native", "eager"])
def test_sparse_decoding_in_any_company_is_bitwise_one_forward_pass(
    indexed, make_ids, path, monkeypatch
):
    if path == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")
    documents = [make_ids(length) for length in (90, 61, 33, 14, 1)]
    packed = indexed(torch.cat(documents), Layout.documents(map(len, documents))).hidden
    replayed = torch.cat(replay_in_random_company(indexed, documents, seed=4))

    assert torch.equal(replayed, packed)

    targets = make_ids(len(packed))
    trained, _ = token_logprobs(packed, indexed.output_weight, targets, temperature=0.7)
    sampled = [
        token_logprobs(h, indexed.output_weight, t, temperature=0.7, chunk_tokens=3)[0]
        for h, t in zip(replayed.split(11), targets.split(11), strict=True)
    ]
    assert torch.equal(torch.cat(sampled), trained)


@pytest.mark.parametrize("name", ["llama", "qwen"])
@pytest.mark.parametrize("path", ["native", "eager"])
def test_dense_decoding_in_any_company_agrees_with_one_forward_pass(
    name, make_ids, path, monkeypatch, request
):
    llama = request.getfixturevalue(name)
    if path == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")
    documents = [make_ids(length) for length in (70, 41, 14, 1)]
    packed = llama(torch.cat(documents), Layout.documents(map(len, documents))).hidden
    replayed = torch.cat(replay_in_random_company(llama, documents, seed=4))
    # Bitwise in the native kernels; eager attention is fp64 rounded once, which is the same but for rare ties.
    torch.testing.assert_close(replayed, packed, rtol=0, atol=0.0 if native() else 1e-6)


def test_a_glm_model_decodes_dense_too(indexed, make_ids):
    ids = make_ids(40)
    cache = indexed.new_cache(2, 64)
    first = indexed.extend(ids[:30], [1], [0], [30], cache, attention="dense")
    rest = [
        indexed.extend(ids[t : t + 1], [1], [t], [1], cache, attention="dense")
        for t in range(30, 40)
    ]
    packed = indexed(ids, Layout.documents([40]), attention="dense").hidden
    torch.testing.assert_close(torch.cat([first, *rest]), packed, rtol=0, atol=1e-5)


def test_a_copied_prefix_is_as_good_as_a_computed_one(decoder, make_ids):
    prompt, answers = make_ids(30), [make_ids(20), make_ids(20)]
    cache = decoder.new_cache(4, 64)
    decoder.extend(make_ids(60), [0], [0], [60], cache)  # leaves stale rows behind
    decoder.extend(prompt, [3], [0], [30], cache)
    cache.copy_prefix(3, 0, 30)
    shared = decoder.extend(torch.cat(answers), [3, 0], [30, 30], [20, 20], cache)

    for answer, got in zip(answers, shared.split(20), strict=True):
        fresh = decoder.new_cache(1, 64)
        whole = decoder.extend(torch.cat([prompt, answer]), [0], [0], [50], fresh)
        torch.testing.assert_close(got, whole[30:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", ["native", "eager"])
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_where_pages_lie_and_who_shares_them_changes_no_bit(
    decoder, make_ids, path, attention, monkeypatch
):
    if path == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")
    prompt, answers = make_ids(70), [make_ids(25), make_ids(25)]

    def decode(cache):
        """Compute the prompt once, then both answers token by token behind it."""
        states = [decoder.extend(prompt, [0], [0], [70], cache, attention=attention)]
        if cache.shape.num_pages is None:
            cache.copy_prefix(0, 1, 70)
        else:
            cache.copy_rows(2, 5, 70 - 64)  # the page in which they part
        for step, ids in enumerate(zip(*answers, strict=True)):
            starts = [70 + step] * 2
            states.append(
                decoder.extend(torch.stack(ids), [0, 1], starts, [1, 1], cache, attention=attention)
            )
        return torch.cat(states)

    own = decoder.new_cache(2, 96, page_tokens=16)
    scattered = decoder.new_cache(2, 96, page_tokens=16, num_pages=9)
    scattered.give_pages(0, [7, 0, 8, 1, 2, 6])
    scattered.give_pages(1, [7, 0, 8, 1, 5])
    scattered.give_pages(1, [3], first=5)
    assert torch.equal(decode(scattered), decode(own))


def test_positions_without_a_page_are_refused(decoder, make_ids):
    cache = decoder.new_cache(2, 96, page_tokens=16, num_pages=4)
    cache.give_pages(0, [3, 1])
    decoder.extend(make_ids(32), [0], [0], [32], cache)
    with pytest.raises(ContractError, match="slot 0 has no page for position 32"):
        decoder.extend(make_ids(1), [0], [32], [1], cache)
    cache.give_pages(0, [3])
    with pytest.raises(ContractError, match="no page for position 31"):
        decoder.extend(make_ids(1), [0], [31], [1], cache)


@pytest.mark.parametrize(("slot", "pages"), [(0, [4]), (0, [-1]), (0, [0] * 7), (2, [0])])
def test_pages_that_do_not_exist_cannot_be_given(decoder, slot, pages):
    cache = decoder.new_cache(2, 96, page_tokens=16, num_pages=4)
    with pytest.raises(ContractError, match=f"slot {slot} (cannot have pages|does not exist)"):
        cache.give_pages(slot, pages)


@pytest.mark.parametrize("size", [8, 48])
def test_pages_are_powers_of_two(decoder, size):
    with pytest.raises(ContractError, match=f"page_tokens={size} has to be a power of two"):
        decoder.new_cache(1, 64, page_tokens=size)


def test_rows_behind_the_end_do_not_matter(decoder, make_ids):
    ids = make_ids(40)
    clean, dirty = decoder.new_cache(2, 64), decoder.new_cache(2, 64)
    decoder.extend(make_ids(120), [0, 1], [0, 0], [64, 56], dirty)
    for cache in (clean, dirty):
        decoder.extend(ids[:39], [1], [0], [39], cache)
    alone = decoder.extend(ids[39:], [1], [39], [1], clean)
    assert torch.equal(decoder.extend(ids[39:], [1], [39], [1], dirty), alone)


def test_a_broken_sequence_leaves_nothing_in_its_slot(decoder, make_ids):
    """After one engine fault the slot is as good as new, and other slots never noticed."""
    ids, broken = make_ids(40).clamp_max(62), torch.full((64,), 63)
    clean, dirty = decoder.new_cache(2, 64), decoder.new_cache(2, 64)
    decoder.model.embed_tokens.weight.data[63] = float("nan")
    assert decoder.extend(broken, [0], [0], [64], dirty).isnan().all()
    outputs = []
    for cache in (clean, dirty):
        for slot in (1, 0):
            prompt = decoder.extend(ids[:20], [slot], [0], [20], cache)
            rest = [decoder.extend(ids[t : t + 1], [slot], [t], [1], cache) for t in range(20, 40)]
            outputs.append(torch.cat([prompt, *rest]))
    assert outputs[0].isfinite().all()
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("slots", "starts", "counts", "message"),
    [
        ([0], [0], [3], "4 token ids do not fit counts that sum to 3"),
        ([0, 0], [0, 2], [2, 2], "repeat"),
        ([2], [0], [4], "slot 2 does not exist"),
        ([1], [14], [4], "positions 14..18"),
        ([0, 1], [0, 0], [4, 0], "gets 0 new tokens"),
    ],
)
def test_tokens_that_do_not_fit_the_cache_are_refused(
    llama, make_ids, slots, starts, counts, message
):
    with pytest.raises(ContractError, match=message):
        llama.extend(make_ids(4), slots, starts, counts, llama.new_cache(2, 16))


@pytest.mark.parametrize("wrong", [64, -1])
def test_an_id_outside_the_vocabulary_is_refused_everywhere(decoder, wrong):
    ids = torch.tensor([3, wrong])
    with pytest.raises(ContractError, match=f"token id {wrong} .* 0..63"):
        decoder(ids, Layout.documents([2]))
    with pytest.raises(ContractError, match=f"token id {wrong} "):
        decoder.extend(ids, [0], [0], [2], decoder.new_cache(1, 8))
    with pytest.raises(ContractError, match=f"token id {wrong} "):
        token_logprobs(torch.zeros(2, 32), decoder.output_weight, ids)


def test_extending_by_nothing_is_refused(decoder):
    with pytest.raises(ContractError, match="no token ids"):
        decoder.extend(torch.tensor([], dtype=torch.long), [], [], [], decoder.new_cache(1, 8))


def test_a_cache_longer_than_the_context_is_refused(decoder):
    with pytest.raises(ContractError, match="max_position_embeddings=256"):
        decoder.new_cache(1, 257)


def test_copying_rows_that_do_not_exist_is_refused(decoder):
    with pytest.raises(ContractError, match="slot 7 does not exist"):
        decoder.new_cache(2, 8).copy_prefix(0, 7, 4)


def test_without_native_kernels_the_last_token_alone_is_the_same_too(glm, make_ids, monkeypatch):
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    ids = make_ids(60)
    whole = glm.extend(ids, [0, 1], [0, 0], [40, 20], glm.new_cache(2, 60))
    ends = glm.extend(ids, [0, 1], [0, 0], [40, 20], glm.new_cache(2, 60), ends_only=True)
    assert torch.equal(ends, whole[[39, 59]])
