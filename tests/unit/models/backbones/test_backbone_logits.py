"""Logits of random models against transformers' own attention and experts: packed, padded, split, cached."""

import random

import pytest
import torch

from longarc.models.build import build_model
from longarc.models.hf_weights import save_pretrained_dir
from longarc.models.layout import Layout, Span
from longarc.models.projection import project_logits
from model_cases import replay_in_random_company
from transformers_cases import (
    FAMILIES,
    of_transformers,
    random_config,
    reference_logits,
    small,
    spread,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 2e-5
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}


def documents_of(rng, lengths):
    return [torch.tensor([rng.randrange(64) for _ in range(length)]) for length in lengths]


def our_logits(model, documents):
    layout = Layout.documents([len(ids) for ids in documents])
    with torch.no_grad():
        logits = project_logits(model(torch.cat(documents), layout).hidden, model.output_weight)
    return logits.split([len(ids) for ids in documents])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_those_of_a_padded_batch_in_transformers(family, seed, tmp_path):
    rng = random.Random(f"{family}/{seed}")
    model = spread(build_model(random_config(family, rng), seed=seed))
    save_pretrained_dir(model, tmp_path)
    documents = documents_of(rng, [1, rng.randint(2, 40), rng.randint(2, 90)])
    expected = reference_logits(of_transformers(tmp_path), documents)
    for ours, theirs in zip(our_logits(model, documents), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert torch.cat(expected).std() > 0.1


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_gives_what_a_packed_pass_gives_however_tokens_come(family, native, monkeypatch):
    monkeypatch.setenv("LONGARC_NATIVE", native)
    rng = random.Random(family)
    model = spread(build_model(small(family), seed=3))
    documents = documents_of(rng, [50, 41, 17])
    expected = model(torch.cat(documents), Layout.documents([50, 41, 17])).hidden.split(
        [50, 41, 17]
    )
    replayed = replay_in_random_company(model, documents, seed=1)
    for ours, packed in zip(replayed, expected, strict=True):
        torch.testing.assert_close(ours, packed.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_is_seen_by_each_answer_as_if_it_stood_alone(family):
    rng = random.Random(family)
    model = spread(build_model(small(family), seed=3))
    prompt, *answers = documents_of(rng, [23, 9, 14])
    layout = Layout((Span(23), Span(9, parent=0), Span(14, parent=0)))
    with torch.no_grad():
        hidden = model(torch.cat([prompt, *answers]), layout).hidden
        for answer, rows in zip(answers, hidden[23:].split([9, 14]), strict=True):
            alone = model(torch.cat([prompt, answer]), Layout.documents([23 + len(answer)])).hidden
            torch.testing.assert_close(rows, alone[23:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_yarn_is_transformers_own_beyond_the_original_context(family, tmp_path):
    rng = random.Random(family)
    stretched = small(family, max_position_embeddings=16, rope_parameters=YARN)
    assert stretched.max_position_embeddings == 64
    model = spread(build_model(stretched, seed=1))
    save_pretrained_dir(model, tmp_path)
    documents = documents_of(rng, [64])
    ours = our_logits(model, documents)[0]
    theirs = reference_logits(of_transformers(tmp_path), documents)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    plain = build_model(small(family, rope_parameters={"rope_theta": 1e4}), seed=1)
    plain.load_state_dict(model.state_dict())
    assert (our_logits(plain, documents)[0] - ours).abs().max() > 0.01


def test_the_spelling_of_older_files_is_the_same_yarn(tmp_path):
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    configs = [
        small("glm4", rope_scaling=older, rope_theta=1e4, max_position_embeddings=16),
        small("glm4", rope_parameters=YARN, max_position_embeddings=16),
    ]
    assert [config.max_position_embeddings for config in configs] == [64, 64]
    documents = documents_of(random.Random(0), [64])
    first, second = (our_logits(build_model(c, seed=1), documents)[0] for c in configs)
    assert torch.equal(first, second)
    raised = configs[0].with_rope_theta(5e5)
    assert raised.rope_theta == 5e5
    assert not torch.equal(our_logits(build_model(raised, seed=1), documents)[0], first)


def test_bf16_keeps_router_and_frequencies_in_fp32(tmp_path):
    model = spread(build_model(small("glm4_moe"), seed=2, dtype=torch.bfloat16))
    gate = model.model.layers[1].mlp.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    save_pretrained_dir(model, tmp_path)
    reference = of_transformers(tmp_path)
    assert reference.dtype == torch.bfloat16
    documents = documents_of(random.Random(0), [40])
    theirs = reference_logits(reference, documents)[0].float()
    torch.testing.assert_close(our_logits(model, documents)[0], theirs, rtol=0, atol=0.1)
