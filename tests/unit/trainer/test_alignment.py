import pytest
import torch
from trainer_fixtures import TINY, TINY_LLAMA, tiny_model

from longarc.config.model import AttentionPattern
from longarc.config.training import OptimizerConfig
from longarc.errors import ContractError
from longarc.models.conversion import to_hybrid
from longarc.trainer.alignment import AttentionAlignment
from longarc.trainer.packing import Document


def documents(step=0):
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (3, 40), generator=draw).tolist()
    return [Document(token_ids=tuple(row)) for row in ids]


def alignment(layers, *, pattern="DG", config=TINY, lr=5e-3, micro_batch_tokens=256):
    teacher = tiny_model(config=config)
    model = to_hybrid(teacher, AttentionPattern(layers=pattern, window=4), seed=1)
    return model, AttentionAlignment(
        model,
        teacher,
        layers,
        optimizer=OptimizerConfig(lr=lr),
        num_steps=20,
        micro_batch_tokens=micro_batch_tokens,
    )


@pytest.mark.parametrize(("config", "pattern"), [(TINY, "DG"), (TINY_LLAMA, "G")])
def test_the_error_falls(config, pattern):
    _, aligned = alignment(range(len(pattern)), config=config, pattern=pattern)
    errors = [aligned.step(documents(step % 2))[0] for step in range(20)]
    assert errors[0].weight == len(pattern)
    first, last = (metric.total / metric.weight for metric in (errors[0], errors[-1]))
    assert last < 0.8 * first


def test_attention_in_its_own_place_has_no_error():
    _, aligned = alignment([0], pattern="FD")
    (error,) = aligned.step(documents())
    assert error.total / error.weight < 1e-9


def test_only_the_replaced_layers_are_trained():
    model, aligned = alignment([1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    aligned.step(documents())
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed
    assert all(name.startswith("model.layers.1.self_attn.") for name in changed)


def test_micro_batches_do_not_change_the_step():
    results = []
    for micro_batch_tokens in (256, 40):
        model, aligned = alignment([0, 1], micro_batch_tokens=micro_batch_tokens, lr=1e-3)
        (error,) = aligned.step(documents())
        results.append((error.total, model.state_dict()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=0, atol=2e-5)


def test_a_step_without_documents_is_refused():
    _, aligned = alignment([0])
    with pytest.raises(ContractError, match="weights are unchanged"):
        aligned.step([])


@pytest.mark.parametrize("layers", [[], [2], [-1]])
def test_layers_that_do_not_exist_are_refused(layers):
    with pytest.raises(ContractError, match=r"name at least one of layers 0\.\.1"):
        alignment(layers)
