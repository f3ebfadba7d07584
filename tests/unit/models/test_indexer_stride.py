import torch

from longarc.config.model import GlmMoeDsaConfig
from longarc.models.build import build_model
from longarc.models.layout import Layout

CONFIG = GlmMoeDsaConfig(vocab_size=64, index_topk=8, max_position_embeddings=128)


def loss(stride):
    model = build_model(CONFIG, seed=0)
    ids = torch.arange(40) % 64
    return model(ids, Layout.documents([40]), indexer_loss="sparse", indexer_stride=stride)


def test_a_stride_looks_at_fewer_queries_and_counts_them():
    every, third = loss(1), loss(3)
    assert every.num_indexer_terms == 40 * 4
    assert third.num_indexer_terms == 14 * 4
    assert 0 < third.indexer_loss_sum < every.indexer_loss_sum


def test_the_hidden_states_do_not_depend_on_the_stride():
    assert torch.equal(loss(1).hidden, loss(5).hidden)
