import torch

from longarc.models import gathered_attention, indexer, key_selection
from longarc.models.build import build_model
from longarc.models.layout import Layout, Span
from model_cases import LargestTensor, small_glm


def test_sparse_training_never_holds_a_number_per_query_and_key(monkeypatch):
    monkeypatch.setattr(gathered_attention, "GATHERED_FLOATS", 1 << 12)
    monkeypatch.setattr(key_selection, "SCORED_FLOATS", 1 << 12)
    monkeypatch.setattr(indexer, "SCORED_FLOATS", 1 << 12)
    model = build_model(small_glm(max_position_embeddings=1024), seed=0)
    ids = torch.randint(0, 64, (900,), generator=torch.Generator().manual_seed(0))
    layout = Layout((Span(500), Span(200, 0), Span(200, 0)))

    with LargestTensor() as largest:
        output = model(ids, layout, attention="sparse", indexer_loss="sparse")
        (output.hidden.sum() + output.indexer_loss_sum).backward()

    assert 900 * 48 <= largest.numel < 900 * 700 // 4
