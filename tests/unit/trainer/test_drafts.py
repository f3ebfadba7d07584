"""Training draft depths: alone on a frozen trunk, or along with it."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch
from trainer_fixtures import TINY, TINY_LLAMA, random_batch, tiny_model

from longarc.algos import losses
from longarc.algos.mtp import acceptance
from longarc.config.training import OptimizerConfig
from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.models.hf_weights import load_weights
from longarc.models.layout import Layout
from longarc.records.metric import combine
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.draft_objective import DraftObjective
from longarc.trainer.packing import Document, pack_shared
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer
from longarc.trainer.update import weights_sha256

DRAFTER = TINY.model_copy(update={"num_nextn_predict_layers": 1})
LOSSES = ("cross_entropy", "single_step_tv", "end_to_end_tv")


def documents(*, seed=0, count=5):
    rng = random.Random(seed)
    return [
        Document(token_ids=[rng.randrange(64) for _ in range(rng.randrange(5, 40))])
        for _ in range(count)
    ]


def make_trainer(*, dtype=torch.float32, model=None, loss="cross_entropy", along=False, **changes):
    drafts = DraftObjective(
        **{"loss": loss, "trains_trunk": bool(along)} | (along if along else {})
    )
    gradients = changes.pop("gradients", None)
    values = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "num_steps": 40,
        "micro_batch_tokens": 4096,
        "mode": "lm" if along else "mtp",
        "drafts": drafts,
    }
    return SupervisedTrainer(
        model or tiny_model(dtype=dtype, config=DRAFTER),
        SupervisedSettings(**(values | changes)),
        **({"gradients": gradients} if gradients else {}),
    )


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def moved(before, after):
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def trunk(state):
    return {name: value for name, value in state.items() if not name.startswith("mtp.")}


@pytest.mark.parametrize("attention", ["sparse", "dense"])
@pytest.mark.parametrize("loss", LOSSES)
def test_alone_the_drafts_learn_and_the_trunk_keeps_every_bit(loss, attention):
    trainer = make_trainer(loss=loss, attention=attention, router_bias_rate=1e-3)
    before = weights(trainer)
    values = [combine(trainer.step(documents()).metrics) for _ in range(10)]
    assert values[-1]["loss/mtp"] < values[0]["loss/mtp"]
    names = moved(before, weights(trainer))
    assert names
    assert all(name.startswith("mtp.") for name in names)
    assert any("indexer" in name for name in names) == (attention == "sparse")
    assert "mtp.mlp.gate.e_score_correction_bias" in names
    assert "loss/lm_nats" not in values[0]
    assert "grad/norm" not in values[0]


def test_a_tv_loss_raises_acceptance_more_than_the_text_does():
    """The text is random, so cross-entropy cannot learn what an untrained model thinks of it."""
    lengths = {}
    for loss in ("cross_entropy", "end_to_end_tv"):
        trainer = make_trainer(loss=loss)
        for step in range(16):
            values = combine(trainer.step(documents(seed=step)).metrics)
        lengths[loss] = values["mtp/accept_length_tokens"]
    assert lengths["end_to_end_tv"] > lengths["cross_entropy"]


def plain_losses(model, document):
    """The three losses of one document, from full tables of probabilities."""
    ids = torch.tensor(document.token_ids)
    layout = Layout.documents([len(ids)])
    hidden = model(ids, layout, attention="dense").hidden
    states = model.drafts(hidden, ids, layout, attention="dense", trains_trunk=True).hidden
    probs = (hidden @ model.output_weight.T).softmax(dim=-1).detach()
    logits = states @ model.output_weight.T
    mask = document.train_mask or [True] * len(ids)
    entropy = single = chain = 0.0
    length, num_chains = 0.0, 0
    alpha = {}
    for position in range(2, len(ids)):
        for depth in range(1, 4):
            if mask[position] and position - 1 >= depth:
                row = position - 1
                alpha[depth, position] = acceptance(probs[row], logits[depth - 1, row])
                entropy = entropy - logits[depth - 1, row].log_softmax(dim=-1)[ids[position]] / 3
                single = single + (1 - alpha[depth, position]) / 3
    for position in range(2, len(ids)):
        if not mask[position]:
            continue
        product, accepted, num_steps = 1.0, 0.0, 0
        for step in range(3):
            if (1 + step, position + step) not in alpha:
                break
            product = product * alpha[1 + step, position + step]
            accepted = accepted + product
            num_steps += 1
        chain = chain + 1 - accepted / 3
        if num_steps == 3:
            length, num_chains = length + accepted.item(), num_chains + 1
    values = dict(zip(LOSSES, (entropy, single, chain), strict=True))
    return values, length, num_chains


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_losses_and_gradients_are_the_plain_formulas(loss, masked):
    model = tiny_model(dtype=torch.float64, config=DRAFTER)
    rng = random.Random(7)
    given = [
        replace(d, train_mask=[rng.random() < 0.8 for _ in d.token_ids]) if masked else d
        for d in documents()
    ]
    (micro_batch,) = pack_shared(given, micro_batch_tokens=4096)
    objective = DraftObjective(loss=loss, weight=0.5, trains_trunk=True)
    hidden = model(micro_batch.token_ids, micro_batch.layout, attention="dense").hidden
    total, sums = objective.terms(model, hidden, micro_batch, step=0, is_sparse=False)
    plain = [plain_losses(model, document) for document in given]
    expected = sum(values[loss] for values, *_ in plain)
    torch.testing.assert_close(total, 0.5 * expected, rtol=1e-10, atol=1e-10)
    assert sums.loss == pytest.approx(expected.item(), rel=1e-10)
    assert sums.num_accepted == pytest.approx(sum(length for _, length, _ in plain), rel=1e-10)
    assert sums.num_chains == sum(count for *_, count in plain)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(total, parameters, allow_unused=True),
        torch.autograd.grad(0.5 * expected, parameters, allow_unused=True),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("along", [False, {"weight": 0.3, "trains_trunk": False}])
def test_each_loss_of_the_drafts_is_divided_by_its_own_count(along):
    ids = torch.arange(20)
    model = tiny_model(dtype=torch.float64, config=DRAFTER)
    packed = ids[:-1], Layout.documents([19])
    output = model.drafts(model(*packed).hidden, *packed, with_indexer_loss=True, indexer_stride=2)
    logprobs = (output.hidden @ model.output_weight.detach().T).log_softmax(dim=-1)
    nll = -logprobs[:, torch.arange(19), ids[1:]][output.has_draft].sum() / 3 / 19
    kl = output.indexer_loss_sum / output.num_indexer_terms
    assert output.num_indexer_terms == 9
    total = (along["weight"] if along else 1.0) * nll + 5.0 * kl
    grads = torch.autograd.grad(total, list(model.mtp.parameters()), allow_unused=True)
    expected = torch.cat([g.flatten() for g in grads if g is not None]).norm().item()
    trainer = make_trainer(
        dtype=torch.float64,
        along=along,
        attention="sparse",
        indexer_loss_coeff=5.0,
        indexer_stride=2,
    )
    values = combine(trainer.step([Document(token_ids=ids.tolist())]).metrics)
    assert values["grad/mtp_norm"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("along", [False, {"weight": 0.3}])
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_and_shared_prefixes_do_not_change_the_result(loss, along):
    prompt = list(range(20))
    given = [
        *documents(),
        *(Document(token_ids=[*prompt, *d.token_ids]) for d in documents(seed=1, count=2)),
    ]
    results = []
    for micro_batch_tokens in (4096, 64):
        trainer = make_trainer(
            dtype=torch.float64,
            loss=loss,
            along=along,
            attention="dense",
            micro_batch_tokens=micro_batch_tokens,
            router_bias_rate=0.0,
            optimizer=OptimizerConfig(lr=1e-2, use_muon=False, grad_clip=1e9),
        )
        values = combine(trainer.step(given).metrics)
        kept = ("loss/mtp", "mtp/accept_length_tokens", "grad/mtp_norm")
        results.append(weights(trainer) | {name: torch.tensor(values[name]) for name in kept})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=1e-8, msg=name)


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_drafts_trained_along_without_the_trunk_change_no_bit_of_it(attention):
    plain = make_trainer(along={"trains_trunk": False}, drafts=None, attention=attention)
    along = make_trainer(along={"trains_trunk": False, "weight": 5.0}, attention=attention)
    before = weights(along)
    for step in range(3):
        for trainer in (plain, along):
            trainer.step(documents(seed=step))
    assert not moved(trunk(weights(plain)), weights(along))
    assert any(name.startswith("mtp.") for name in moved(before, weights(along)))
    assert all(not name.startswith("mtp.") for name in moved(before, weights(plain)))


def test_drafts_trained_along_with_the_trunk_move_it():
    plain = make_trainer(along={"trains_trunk": False}, drafts=None)
    along = make_trainer(along={"weight": 0.3})
    reports = [combine(trainer.step(documents()).metrics) for trainer in (plain, along)]
    assert reports[0]["loss/lm_nats"] == reports[1]["loss/lm_nats"]
    assert {"loss/mtp_nats/depth_3", "mtp/acceptance_frac/depth_1"} <= reports[1].keys()
    assert "loss/mtp" not in reports[0]
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= moved(weights(plain), weights(along))


def test_cross_entropy_comes_first_where_it_is_asked_for():
    begins = DraftObjective(loss="end_to_end_tv", cross_entropy_steps=2)
    assert [begins.loss_of(step) for step in (0, 1, 2)] == [
        "cross_entropy",
        "cross_entropy",
        "end_to_end_tv",
    ]
    text = make_trainer(loss="cross_entropy")
    late = make_trainer(drafts=begins)
    for trainer in (text, late):
        for step in range(2):
            trainer.step(documents(seed=step))
    assert weights_sha256(text.model) == weights_sha256(late.model)
    for trainer in (text, late):
        trainer.step(documents())
    assert weights_sha256(text.model) != weights_sha256(late.model)


@pytest.mark.parametrize("along", [False, {"weight": 0.3}], ids=["alone", "along"])
def test_a_resumed_trainer_ends_bit_identical(tmp_path, along):
    whole = make_trainer(along=along, attention="sparse")
    for step in range(4):
        whole.step(documents(seed=step))
    first = make_trainer(along=along, attention="sparse")
    for step in range(2):
        first.step(documents(seed=step))
    first.save(str(tmp_path))
    second = make_trainer(along=along, attention="sparse", model=tiny_model(seed=9, config=DRAFTER))
    second.load(str(tmp_path))
    for step in range(2, 4):
        second.step(documents(seed=step))
    assert weights_sha256(second.model) == weights_sha256(whole.model)


def test_two_processes_draft_what_one_does():
    pool = GradientPool(2)
    try:
        results = []
        for gradients in (None, pool.open, pool.open):
            trainer = make_trainer(
                gradients=gradients,
                dtype=torch.float64,
                loss="end_to_end_tv",
                optimizer=OptimizerConfig(lr=1e-2, grad_clip=1e-3),
            )
            values = combine(trainer.step(documents(count=6)).metrics)
            del values["train/tokens_per_s"], values["router/max_load"]
            results.append((values, weights(trainer)))
    finally:
        pool.close()
    (one_values, one), (two_values, two), (again_values, again) = results
    assert one_values == pytest.approx(two_values, rel=1e-9)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-9, msg=name)
    assert again_values == two_values
    assert not moved(two, again)


def test_documents_too_short_to_draft_are_refused_alone_and_harmless_along():
    short = [Document(token_ids=[1, 2]), Document(token_ids=[3, 4])]
    trainer = make_trainer()
    before = weights(trainer)
    with pytest.raises(ContractError, match="nothing to draft"):
        trainer.step(short)
    assert not moved(before, weights(trainer))
    values = combine(make_trainer(along={"weight": 0.3}, attention="sparse").step(short).metrics)
    assert math.isfinite(values["loss/lm_nats"])
    assert "mtp/accept_length_tokens" not in values
    # A micro-batch of its own, in which nothing has a gradient.
    lonely = make_trainer(micro_batch_tokens=8).step([short[0], Document(token_ids=range(9))])
    assert combine(lonely.metrics)["mtp/accept_length_tokens"] >= 1


def test_a_model_without_drafts_is_refused():
    for config, message in ((TINY, "no MTP layer"), (TINY_LLAMA, "llama model has no MTP layer")):
        trainer = make_trainer(model=tiny_model(config=config), along={"weight": 1.0})
        with pytest.raises(ContractError, match=message):
            trainer.step(documents())


def test_reinforcement_learning_carries_drafts_along_untouched(tmp_path):
    trainer = PolicyTrainer(
        tiny_model(config=DRAFTER),
        PolicySettings(
            optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
            num_steps=4,
            micro_batch_tokens=4096,
            router_bias_rate=1e-2,
        ),
        loss=losses.icepop,
        publish_directory=str(tmp_path),
    )
    before = weights(trainer)
    trainer.take_step(random_batch())
    names = moved(before, weights(trainer))
    assert names
    assert not any(name.startswith("mtp.") for name in names)
    source = asyncio.run(trainer.publish())
    received = build_model(DRAFTER, seed=5)
    load_weights(received, source.path)
    assert weights_sha256(received) == weights_sha256(trainer.model)
