"""A small model of all the parts, as the first GLM and GLM-130B put them together: it must not see its targets, and learn."""

import random

import pytest
import torch
import torch.nn.functional as F
from elder_cases import IDS
from torch import nn

from longarc.models.elders.blank_infilling import BlankKind, InfillingExample, draw_example
from longarc.models.elders.glm_130b import DeepNorm, GeGLU, init_deepnorm, shrink_gradient
from longarc.models.elders.infilling_batch import InfillingBatch

VOCAB, WIDTH, HEADS, LAYERS = 24, 48, 4, 3
EVERY_KIND = dict.fromkeys(BlankKind, 1.0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key, self.value, self.output = (nn.Linear(WIDTH, n * WIDTH) for n in (2, 1, 1))
        self.feed_forward = GeGLU(WIDTH, 2 * WIDTH)
        self.norms = nn.ModuleList(DeepNorm(WIDTH, num_layers=LAYERS) for _ in range(2))

    def forward(self, x, mask):
        split = [
            part.view(len(x), HEADS, -1).transpose(0, 1)
            for part in (*self.query_key(x).chunk(2, -1), self.value(x))
        ]
        attended = F.scaled_dot_product_attention(*split, attn_mask=mask)
        x = self.norms[0](x, self.output(attended.transpose(0, 1).flatten(1)))
        return self.norms[1](x, self.feed_forward(x))


class Infiller(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.places, self.block_places = (
            nn.Embedding(n, WIDTH) for n in (VOCAB, 64, 64)
        )
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for embedding in (self.tokens, self.places, self.block_places):
            nn.init.normal_(embedding.weight, std=0.5, generator=generator)
        for layer in self.layers:
            ffn = layer.feed_forward
            init_deepnorm(
                [layer.value, layer.output, ffn.gate_proj, ffn.up_proj, ffn.down_proj],
                [layer.query_key],
                num_layers=LAYERS,
                generator=generator,
            )

    def forward(self, batch):
        x = self.tokens(batch.token_ids)
        x = x + self.places(batch.positions) + self.block_places(batch.block_positions)
        x, mask = shrink_gradient(x), batch.dense_mask()
        for layer in self.layers:
            x = layer(x, mask)
        return F.linear(x, self.tokens.weight)


def text(rng):
    """Count upwards from anywhere, in a circle."""
    start = rng.randrange(10)
    return [10 + (start + index) % 10 for index in range(rng.randint(8, 16))]


def examples(rng, num):
    return [
        draw_example(text(rng), ids=IDS, shares=EVERY_KIND, rng=rng, sentence_starts=[0, 3, 6])
        for _ in range(num)
    ]


@pytest.mark.parametrize("kind", BlankKind)
def test_no_logit_depends_on_what_comes_after_it_in_part_b_or_on_another_example(kind):
    rng = random.Random(4)
    first, second = (
        draw_example(text(rng), ids=IDS, shares={kind: 1.0}, rng=rng, sentence_starts=[0, 3, 6])
        for _ in range(2)
    )
    model = Infiller(seed=0)
    with torch.no_grad():
        before = model(InfillingBatch.of([first, second]))
        for changed in range(len(first.token_ids)):
            ids = list(first.token_ids)
            ids[changed] = 9
            other = InfillingExample(
                token_ids=tuple(ids),
                target_ids=first.target_ids,
                train_mask=first.train_mask,
                positions=first.positions,
                block_positions=first.block_positions,
                num_context_tokens=first.num_context_tokens,
            )
            after = model(InfillingBatch.of([other, second]))
            differs = (after - before).abs().amax(-1) > 1e-6
            is_context = changed < first.num_context_tokens
            first_seeing = 0 if is_context else changed
            assert differs.nonzero()[:, 0].tolist() == [*range(first_seeing, len(first.token_ids))]


@pytest.mark.slow
def test_the_model_learns_to_fill_blanks_of_every_kind():
    rng, model = random.Random(0), Infiller(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        batch = InfillingBatch.of(examples(rng, 16))
        logits = model(batch)[batch.train_mask]
        loss = F.cross_entropy(logits, batch.target_ids[batch.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batch = InfillingBatch.of(examples(random.Random(1), 50))
    with torch.no_grad():
        predicted = 10 + model(batch)[:, 10:20].argmax(-1)
    # What follows from the visible text: neither where a last blank ends, nor how a first one begins.
    is_determined = batch.train_mask & (batch.target_ids != IDS.end) & (batch.positions > 0)
    is_right = (predicted == batch.target_ids)[is_determined]
    assert is_right.double().mean() > 0.8  # a tenth by chance
