"""Draw the figures of docs/guides/glm5-architecture.md from the tensors of a finished run.

Usage: python scripts/draw_guide.py [runs/quickstart] [--stage sft]; needs matplotlib, as in longarc[docs].
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from longarc.config.recipe import Recipe
from longarc.config.recorded import read_recorded
from longarc.config.rollout import TaskShare
from longarc.data.documents import Document
from longarc.data.sft import conversation_document
from longarc.models.decoder_base import Decoder
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.pipeline.workspace import TOKENIZER_FILE, load_checkpoint, task_family
from longarc.runs.directory import RunDirectory
from longarc.tokens.formats import make_chat_format
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.muon import orthogonalise, update_scale

FIGURES = Path(__file__).parents[1] / "docs" / "guides"
HAYSTACK_TOKENS = 600
NUM_DOCUMENTS = 16


def read_documents(run: RunDirectory, recipe: Recipe, family: str, count: int) -> list[Document]:
    """Return demonstrations of a family of the run, as tokens."""
    settings: dict[str, Any] = {}
    if family == "recall":
        settings["expert_tokens"] = (HAYSTACK_TOKENS, HAYSTACK_TOKENS + 50)
    expert: Any = task_family(recipe, family, TaskShare(settings=settings))
    tokenizer = Tokenizer.load(run.path / TOKENIZER_FILE)
    form = make_chat_format(recipe.tokenizer.chat_format, tokenizer)
    return [
        conversation_document(expert.demonstration(10_000 + i), form, max_tokens=4096)
        for i in range(count)
    ]


@contextmanager
def recorded_selections(model: Decoder) -> Iterator[dict[int, Tensor]]:
    """Note what each indexer of a model selects meanwhile, [queries, selected], by layer."""
    selected: dict[int, Tensor] = {}

    def record(layer: int, indexer: Any) -> None:
        select = indexer.select

        def recording(*arguments: Any, **named: Any) -> Tensor:
            selected[layer] = rows = select(*arguments, **named)
            return rows

        indexer.select = recording

    indexers = [
        (layer, module.self_attn.indexer)
        for layer, module in enumerate(model.model.layers)
        if getattr(module.self_attn, "indexer", None) is not None
    ]
    for layer, indexer in indexers:
        record(layer, indexer)
    try:
        yield selected
    finally:
        for _, indexer in indexers:
            del indexer.select


def draw_selection(model: Decoder, document: Document, tokenizer: Tokenizer, path: Path) -> None:
    """Draw which keys each layer reads while a needle is found among other lines."""
    ids = torch.tensor(document.token_ids)
    with torch.no_grad(), recorded_selections(model) as selected:
        model(ids, Layout.documents([len(ids)]), attention="sparse")
    needle = needle_span(document, tokenizer)
    figure, axes = plt.subplots(1, len(selected), figsize=(4 * len(selected), 4.4), sharey=True)
    for axis, (layer, rows_NS) in zip(axes, sorted(selected.items()), strict=True):
        read = torch.zeros(len(ids), len(ids) + 1, dtype=torch.bool)
        read.scatter_(1, torch.where(rows_NS < 0, len(ids), rows_NS), True)
        axis.imshow(read[:, :-1], cmap="Blues", interpolation="nearest", vmax=1.6)
        axis.axvspan(needle.start, needle.stop, color="tab:orange", alpha=0.35, lw=0)
        share = read[-1, needle.start : needle.stop].float().mean().item()
        axis.set_title(f"layer {layer}: the last token reads {share:.0%} of the needle", fontsize=9)
        axis.set_xlabel("position of the key [tokens]")
    axes[0].set_ylabel("position of the query [tokens]")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def needle_span(document: Document, tokenizer: Tokenizer) -> slice:
    """Return where the answer's tokens stand in the haystack."""
    answer = [i for i, m in zip(document.token_ids, document.train_mask, strict=True) if m]
    words = [i for i in answer if tokenizer.decode([i]).strip(" :\n").isalpha()]
    code = words[-2:] if len(words) >= 2 else words
    ids = list(document.token_ids)
    for start in range(len(ids)):
        window = ids[start : start + 8]
        if window and window[0] == code[0] and code[-1] in window:
            return slice(start, start + window.index(code[-1]) + 1)
    raise SystemExit(f"the answer {tokenizer.decode(answer)!r} does not stand in the haystack")


def draw_updates(model: Decoder, documents: list[Document], path: Path) -> None:
    """Draw the size of Muon's update of each head's keys and values, whole and split."""
    ids = torch.tensor([i for document in documents for i in document.token_ids])
    lengths = [len(document.token_ids) for document in documents]
    hidden = model(ids, Layout.documents(lengths), attention="sparse").hidden
    ends = torch.tensor(lengths).cumsum(0) - 1
    has_target = torch.ones(len(ids), dtype=torch.bool)
    has_target[ends] = False
    targets = ids.roll(-1)[has_target]
    logprobs, _ = token_logprobs(hidden[has_target], model.output_weight, targets)
    (-logprobs.mean()).backward()

    heads = model.config.num_attention_heads
    nope = model.config.qk_nope_head_dim
    names = [f"{part}{head}" for part in "KV" for head in range(heads)]
    figure, axes = plt.subplots(
        1, len(model.model.layers), figsize=(3.4 * len(model.model.layers), 3), sharey=True
    )
    for number, (axis, layer) in enumerate(zip(axes, model.model.layers, strict=True)):
        grad = layer.self_attn.kv_b_proj.weight.grad
        assert grad is not None
        whole = orthogonalise(grad[None])[0] * update_scale(*grad.shape)
        place = torch.arange(len(names))
        for shift, label, colour, sizes in (
            (-0.2, "whole matrix", "tab:orange", block_sizes(whole, heads, nope)),
            (0.2, "each head (Muon Split)", "tab:blue", split_sizes(grad, heads, nope)),
        ):
            axis.bar(place + shift, sizes, width=0.4, label=label, color=colour)
        axis.set_title(f"layer {number}", fontsize=9)
        axis.set_xticks(place.tolist(), names, fontsize=8)
    axes[0].set_ylabel("RMS of the update over the rate")
    axes[0].set_ylim(0, 0.26)
    axes[0].legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parts_of(matrix: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Return what makes the keys and what makes the values, [heads, rows, latent] each."""
    per_head = matrix.view(heads, -1, matrix.shape[-1])
    return per_head[:, :nope], per_head[:, nope:]


def block_sizes(update: Tensor, heads: int, nope: int) -> Tensor:
    """Return the root mean square of each head's keys, then of its values."""
    return torch.cat([p.pow(2).mean(dim=(1, 2)).sqrt() for p in parts_of(update, heads, nope)])


def split_sizes(grad: Tensor, heads: int, nope: int) -> Tensor:
    """Return the same where each of these matrices is orthogonalised by itself."""
    updates = [orthogonalise(p) * update_scale(*p.shape[1:]) for p in parts_of(grad, heads, nope)]
    return torch.cat([update.pow(2).mean(dim=(1, 2)).sqrt() for update in updates])


def main() -> None:
    """Draw both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--stage", default="sft")
    options = parser.parse_args()
    mpl.use("Agg")
    run = RunDirectory.look(options.run)
    recipe = read_recorded(run.recipe(), source=str(options.run)).recipe
    final = run.stage(options.stage).final()
    if final is None:
        raise SystemExit(f"stage {options.stage!r} of {options.run} is not finished")
    model = load_checkpoint(final).model
    tokenizer = Tokenizer.load(options.run / TOKENIZER_FILE)
    (needle,) = read_documents(run, recipe, "recall", 1)
    draw_selection(model, needle, tokenizer, FIGURES / "selected-keys.png")
    draw_updates(
        model,
        read_documents(run, recipe, "files", NUM_DOCUMENTS),
        FIGURES / "muon-split.png",
    )
    for path in sorted(FIGURES.glob("*.png")):
        print(path)


if __name__ == "__main__":
    main()
