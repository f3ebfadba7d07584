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


def kept_bytes(model, indexer_loss):
    """Return the bytes of all tensors that a forward pass keeps for backward."""
    kept = {}

    def keep(x):
        kept[x.data_ptr(), x.shape] = x
        return x

    ids, layout = torch.zeros(1024, dtype=torch.long), Layout.documents([1024])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(ids, layout, attention="sparse", indexer_loss=indexer_loss)
    return sum(x.nbytes for x in kept.values())


def test_the_loss_of_the_indexer_keeps_no_keys_and_scores_of_all_queries():
    shape = {"num_hidden_layers": 1, "index_topk": 128, "index_head_dim": 16}
    model = build_model(small_glm(**shape, max_position_embeddings=1024), seed=0)
    more = kept_bytes(model, "sparse") - kept_bytes(model, "none")
    selection_and_attention = 1024 * 128 * (8 + 4)
    assert more < 2 * selection_and_attention < 1024 * 128 * 16 * 4  # the gathered keys
