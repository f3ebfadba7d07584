"""The bytes of a token's routing: they come back, are as many as promised, and others are refused."""

import random

import numpy as np
import pytest
import torch

from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.models.routed_rows import RoutingShape, blobs_of
from model_cases import small_glm

NO_KEY = -1


def shape_of(kept="experts_and_keys", **changes):
    return RoutingShape.of(small_glm(**changes), kept, attention="sparse")


SHAPES = {
    "bits": shape_of(index_topk=12, max_position_embeddings=256),
    # Beyond 2 * 12 * 8 positions the bits are longer than the list.
    "bits, then positions": shape_of(index_topk=12, max_position_embeddings=1024),
    "a long context": shape_of(index_topk=12, max_position_embeddings=100_000),
    "experts beyond a byte": shape_of(n_routed_experts=300, num_experts_per_tok=5),
    "no experts": shape_of(first_k_dense_replace=3, max_position_embeddings=1024),
    "experts alone": shape_of("experts", max_position_embeddings=1024),
}


def routing_of(shape, positions, *, num_experts=6, seed=0):
    rng = random.Random(seed)
    experts = [
        [rng.sample(range(num_experts), shape.num_chosen) for _ in positions]
        for _ in range(shape.num_expert_layers)
    ]
    keys = np.full((shape.num_indexers, len(positions), shape.num_selected), NO_KEY)
    for place in np.ndindex(keys.shape[:2]):
        position = positions[place[1]]
        count = min(position + 1, shape.num_selected)
        keys[place][:count] = sorted(rng.sample(range(position + 1), count))
    empty = (shape.num_expert_layers, len(positions), shape.num_chosen)
    return np.asarray(experts, dtype=np.int64).reshape(empty), keys


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("first", [0, 5, 180, 400])
def test_routing_comes_back_from_its_bytes(name, first):
    shape = SHAPES[name]
    positions = range(first, first + 40)
    experts, keys = routing_of(shape, positions)
    blobs = shape.encode(experts, keys, first)
    assert [len(blob) for blob in blobs] == [shape.blob_bytes(p) for p in positions]
    # Packs hold tokens of many sequences.
    order = random.Random(1).sample(range(40), 40)
    found = shape.decode([blobs[i] for i in order], [positions[i] for i in order])
    if shape.num_expert_layers:
        assert np.array_equal(found.experts.numpy(), experts[:, order])
    else:
        assert found.experts is None
    if shape.num_indexers:
        assert np.array_equal(found.keys.numpy(), keys[:, order])
    else:
        assert found.keys is None


def test_a_token_costs_no_more_than_the_shorter_of_bits_and_positions():
    shape = SHAPES["bits, then positions"]
    assert shape.blob_bytes(11) == 2 * 2  # two layers, two experts
    assert shape.blob_bytes(12) == 4 + 3 * 2
    assert shape.blob_bytes(183) == 4 + 3 * 23
    assert shape.blob_bytes(184) == shape.blob_bytes(900) == 4 + 3 * 24
    assert shape.row_bytes == 4 + 3 * 24
    assert SHAPES["a long context"].blob_bytes(50_000) == 4 + 3 * 48


def test_blocks_of_many_tokens_are_the_tokens(monkeypatch):
    shape = SHAPES["bits"]
    experts, keys = routing_of(shape, range(200))
    whole = shape.encode(experts, keys, 0)
    monkeypatch.setattr("longarc.models.routed_rows._BLOCK_NUMBERS", 1000)
    assert shape.encode(experts, keys, 0) == whole
    assert np.array_equal(shape.decode(whole, range(200)).keys.numpy(), keys)


def test_bytes_of_another_length_or_with_other_counts_are_refused():
    shape = SHAPES["bits"]
    blobs = shape.encode(*routing_of(shape, range(40)), 0)
    with pytest.raises(
        ContractError, match=r"packed token 1, at position 30, has 4 bytes, but .*16"
    ):
        shape.decode([blobs[30], blobs[3]], [30, 30])
    with pytest.raises(ContractError, match="names not 12 keys"):
        shape.decode([blobs[30][:4] + b"\xff" * 12], [30])


def test_a_cache_that_keeps_no_routing_says_so_and_one_that_does_counts_its_memory():
    model = build_model(small_glm(), seed=0)
    cache = model.new_cache(2, 64)
    with pytest.raises(ContractError, match="does not keep what tokens are routed to"):
        cache.routing_of(0, 0, 1)
    before = cache.num_bytes
    cache.keep_routing(SHAPES["bits"])
    assert cache.num_bytes - before == cache.num_rows * SHAPES["bits"].row_bytes


def test_a_copied_prefix_has_its_routing():
    model = build_model(small_glm(), seed=0)
    cache = model.new_cache(2, 96, page_tokens=16)
    cache.keep_routing(SHAPES["bits"])
    ids = torch.arange(40) % 60
    model.extend(ids, [0], [0], [40], cache)
    cache.copy_prefix(0, 1, 37)
    whole = blobs_of([cache.routing_of(0, 0, 37)])
    assert blobs_of([cache.routing_of(1, 0, 10), cache.routing_of(1, 10, 37)]) == whole
    assert any(map(any, whole))
