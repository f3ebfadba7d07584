import pytest
import torch

from longarc.config.model import AttentionPattern, LlamaConfig
from longarc.data.needles import held_out
from longarc.errors import ConfigError
from longarc.models.build import build_model
from longarc.models.decoder_base import ForwardOutput
from longarc.pipeline.needles import needle_score, score_kind, score_texts
from longarc.pipeline.pattern_search import PatternSearchConfig, search_pattern
from token_samples import small_tokenizer

TOKENIZER = small_tokenizer()


def texts(kind, count=3):
    return held_out(
        kind,
        seed=0,
        count=count,
        num_tokens=800,
        count_tokens=lambda text: len(TOKENIZER.encode(text)),
    )


class Oracle:
    """A model that knows the next token, but for those at some places."""

    compute_dtype = "float32"

    def __init__(self, wrong=()):
        self.output_weight = 100 * torch.eye(TOKENIZER.vocab_size)
        self.wrong = wrong

    def __call__(self, token_ids, layout, *, attention):
        following = token_ids.roll(-1)
        for place in self.wrong:
            following[place - 1] = 0
        return ForwardOutput(
            hidden=torch.eye(TOKENIZER.vocab_size)[following],
            indexer_loss_sum=torch.zeros(()),
            num_indexer_terms=0,
            expert_counts=torch.zeros(0, 0, dtype=torch.long),
        )


def answer_places(batch):
    places, position = [], 0
    for text in batch:
        for piece in text.pieces:
            length = len(TOKENIZER.encode(piece.text))
            if piece.is_answer:
                places.append(range(position, position + length))
            position += length
    return places


@pytest.mark.parametrize(
    ("kind", "answers"), [("single", 3), ("multi_key", 48), ("multi_value", 72)]
)
def test_who_knows_every_answer_gets_all_points(kind, answers):
    score = score_texts(Oracle(), TOKENIZER, texts(kind))
    assert (score.num_right, score.num_answers) == (answers, answers)
    assert score.logprob == pytest.approx(0.0, abs=1e-6)


def test_one_wrong_token_makes_one_answer_wrong():
    batch = texts("multi_key")
    place = answer_places(batch)[5][-1]
    score = score_texts(Oracle(wrong=[place]), TOKENIZER, batch)
    assert (score.num_right, score.num_answers) == (47, 48)
    assert score.logprob < -1


def test_tokens_that_are_no_answer_do_not_count():
    batch = texts("single")
    before = [answers[0] - 1 for answers in answer_places(batch)]
    assert score_texts(Oracle(wrong=before), TOKENIZER, batch).right_frac == 1.0


def test_a_text_is_the_same_tokens_whole_and_in_pieces():
    """Else the model would see other tokens when it is scored than when it was trained."""
    for kind in ("single", "multi_key", "multi_value"):
        for text in texts(kind):
            pieces = [i for piece in text.pieces for i in TOKENIZER.encode(piece.text)]
            assert pieces == TOKENIZER.encode(text.text)


def tiny():
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        initializer_range=0.3,
    )
    return build_model(config, seed=0)


def test_a_score_does_not_depend_on_how_texts_are_packed(monkeypatch):
    model = tiny()
    together = score_kind(model, TOKENIZER, "multi_key", context_tokens=800, num_texts=4)
    monkeypatch.setattr("longarc.pipeline.needles._PACKED_TOKENS", 1)
    apart = score_kind(model, TOKENIZER, "multi_key", context_tokens=800, num_texts=4)
    assert together.logprob_sum == pytest.approx(apart.logprob_sum, rel=1e-4)
    assert together.num_answers == apart.num_answers == 64


def test_the_default_scorer_is_the_mean_over_kinds():
    value = needle_score(tiny(), TOKENIZER, context_tokens=800, num_texts=1)
    assert -1 < value <= 1


def worth(model, tokenizer, *, bonus=0.0):
    """A scorer: layer 1 is needed, and layer 0 more than layer 2."""
    layers = model.config.pattern.layers
    calls.append(layers)
    return 4.0 * (layers[1] == "F") + 2.0 * (layers[0] == "F") + (layers[2] == "F") + bonus


calls: list[str] = []


def config(**changes):
    values = {"num_converted": 2, "window": 7, "beam": 2, "scorer": f"{__name__}:worth"}
    return PatternSearchConfig(**(values | changes))


def test_a_search_finds_the_layers_that_can_do_with_a_window():
    calls.clear()
    steps = search_pattern(tiny(), TOKENIZER, config())
    assert steps[-1].kept[0].layers == "SFS"
    assert len(calls) == len(set(calls)) == 6


def test_a_scorer_sees_the_converted_model(monkeypatch):
    seen = []
    monkeypatch.setattr(f"{__name__}.worth", lambda model, tokenizer: seen.append(model) or 0.0)
    search_pattern(tiny(), TOKENIZER, config(num_converted=1))
    assert [model.config.pattern for model in seen] == [
        AttentionPattern(layers=layers, window=7) for layers in ("SFF", "FSF", "FFS")
    ]


def test_known_scores_are_read_from_the_file(tmp_path):
    memo = tmp_path / "scores.json"
    first = search_pattern(tiny(), TOKENIZER, config(num_converted=1), memo=memo)
    calls.clear()
    second = search_pattern(tiny(), TOKENIZER, config(), memo=memo)
    assert second[0] == first[0]
    assert len(calls) == 3
    calls.clear()
    search_pattern(tiny(), TOKENIZER, config(), memo=memo)
    assert calls == []


@pytest.mark.parametrize(
    ("changes", "digest"),
    [({"window": 8}, ""), ({"scorer_settings": {"bonus": 1}}, ""), ({}, "other")],
)
def test_scores_of_another_search_are_not_used(tmp_path, changes, digest):
    memo = tmp_path / "scores.json"
    search_pattern(tiny(), TOKENIZER, config(), memo=memo)
    calls.clear()
    search_pattern(tiny(), TOKENIZER, config(**changes), memo=memo, weights_digest=digest)
    assert len(calls) == 6


def test_a_scorer_that_fails_is_named_with_its_pattern():
    with pytest.raises(ConfigError, match=r"worth failed for SFF: TypeError.*unknown"):
        search_pattern(tiny(), TOKENIZER, config(scorer_settings={"unknown": 1}))


def test_a_file_that_holds_no_scores_is_refused(tmp_path):
    memo = tmp_path / "scores.json"
    memo.write_text("[]")
    with pytest.raises(ConfigError, match="cannot read the scores"):
        search_pattern(tiny(), TOKENIZER, config(), memo=memo)
