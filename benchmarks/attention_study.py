"""Efficient attention compared over growing context, as GLM-5's report does in its section 2.1.2, on the miniature.

A checkpoint of a finished run, which is only read, first learns to find needles, every layer attending to everything.
From these weights every variant goes on, on the same tokens:

    full           every layer attends to everything
    interleaved    every other layer has a sliding window
    searched       as many windows, in the layers that a beam search over needle scores chooses
    gdn            Gated DeltaNet in those layers
    simple-gdn     the delta rule without new parameters in those layers
    dsa            every layer attends to the keys that its indexer selects

gdn and simple-gdn first align their layers with those they replace, dsa warms its indexers up first; these steps
are a part of the same tokens. The windows are also scored without any training, as the report does.

Scores are the share of right answers on held-out needles of three kinds (one key, many keys, several values of a
key), the mean over kinds, by context length. Cells are kept in ``--out`` as they are finished: the same command goes
on where it stopped. Writes results.json, table.md and scores.png there.

Usage: python benchmarks/attention_study.py [--run runs/quickstart] [--out runs/attention] [--seeds 0 1 2] [--quick]
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from attention_cells import BASE_SEED, UNTRAINED, VARIANTS, Cell, Study, load, run_cell, train_base
from common import natural, positive

from longarc.algos.pattern_search import SearchStep
from longarc.errors import ConfigError, LongArcError
from longarc.pipeline.pattern_search import PatternSearchConfig, search_pattern
from longarc.pipeline.workspace import TOKENIZER_FILE
from longarc.runs.checkpoint import read_manifest
from longarc.runs.directory import RunDirectory
from longarc.runs.files import json_document, write_atomically


def with_base(study: Study, out: Path) -> Study:
    """Train what every variant starts from, unless it is there; a file's name says what it depends on."""
    if not study.base_steps:
        return study
    what = [study.weights, study.base_steps, study.context, study.tokens_per_step, study.keys]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
    path = out / f"base-{digest}.safetensors"
    if not path.exists():
        train_base(study, path)
    return replace(study, base=str(path))


def search(study: Study, out: Path, num_converted: int) -> tuple[str, list[SearchStep]]:
    """Search for the windows' layers with texts of one length, which no score is computed from."""
    torch.set_num_threads(1)
    model, tokenizer = load(study)
    steps = search_pattern(
        model,
        tokenizer,
        PatternSearchConfig(
            num_converted=num_converted,
            window=study.window,
            beam=study.beam,
            scorer_settings={
                "context_tokens": study.search_length,
                "num_texts": study.texts,
                "num_keys": study.keys,
                "seed": BASE_SEED,
            },
        ),
        memo=out / "search.json",
        weights_digest=Path(study.base).name,
    )
    return steps[-1].kept[0].layers, steps


class Results:
    """Finished cells, on disk."""

    def __init__(self, path: Path, study: Study) -> None:
        self._path = path
        self._key = hashlib.sha256(json.dumps(asdict(study), sort_keys=True).encode()).hexdigest()[
            :16
        ]
        self._all: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._all.setdefault(self._key, {"study": asdict(study), "cells": {}})

    @property
    def cells(self) -> dict[str, Any]:
        cells: dict[str, Any] = self._all[self._key]["cells"]
        return cells

    def put(self, cell: Cell, result: dict[str, Any]) -> None:
        self.cells[cell.name] = result
        write_atomically(self._path, json_document(self._all))


def mean_score(result: dict[str, Any], length: int) -> float:
    return 100 * statistics.fmean(result["scores"][str(length)].values())


def table(results: Results, study: Study, seeds: Sequence[int]) -> list[str]:
    """Return the rows: a mean over seeds, and the range where there are several."""
    lengths = study.lengths
    head = ["variant", "layers", *(f"{n:,}" for n in lengths), "new parameters"]
    head += [f"cache at {lengths[-1]:,}", "training step", f"prefill of {lengths[-1]:,}"]
    rows = [head, ["---"] * len(head)]
    for variant, trained in [*((v, False) for v in UNTRAINED), *((v, True) for v in VARIANTS)]:
        names = [Cell(variant=variant, seed=s).name for s in (seeds if trained else [None])]
        found = [results.cells[name] for name in names if name in results.cells]
        if not found:
            continue
        scores = [[mean_score(r, n) for r in found] for n in lengths]
        step = [r["step_s"] for r in found if trained]
        rows.append(
            [
                variant if trained else f"{variant}, untrained",
                found[0]["layers"],
                *(spread(values) for values in scores),
                f"{found[0]['new_parameters']:,}",
                f"{found[0]['cache_bytes'] / 1024:,.0f} KiB",
                f"{statistics.median(step):.2f} s" if step else "-",
                f"{statistics.median(r['prefill_s'] for r in found):.2f} s",
            ]
        )
    return ["| " + " | ".join(row) + " |" for row in rows]


def spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.0f}..{max(values):.0f})"


def draw(results: Results, study: Study, seeds: Sequence[int], path: Path) -> None:
    """Draw scores over context: thick lines are means over seeds, thin ones seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, variants, chosen, title in (
        (axes[0], UNTRAINED, [None], "without training"),
        (axes[1], VARIANTS, seeds, f"after {study.steps * study.tokens_per_step:,} tokens"),
    ):
        for variant in variants:
            cells = [results.cells.get(Cell(variant=variant, seed=s).name) for s in chosen]
            found = [c for c in cells if c is not None]
            if not found:
                continue
            lines = [[mean_score(c, n) for n in study.lengths] for c in found]
            mean = [statistics.fmean(column) for column in zip(*lines, strict=True)]
            color = f"C{VARIANTS.index(variant)}"
            axis.plot(study.lengths, mean, marker="o", color=color, linewidth=2, label=variant)
            for line in lines if len(lines) > 1 else []:
                axis.plot(study.lengths, line, color=color, linewidth=0.5, alpha=0.6)
        axis.set(title=title, xlabel="context [tokens]", xscale="log", ylim=(0, 101))
        axis.set_xticks(study.lengths, [f"{n:,}" for n in study.lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("needles found [%]")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def study_of(arguments: argparse.Namespace) -> Study:
    run = RunDirectory.look(arguments.run)
    checkpoint = run.stage(arguments.stage).final()
    if checkpoint is None:
        raise ConfigError(
            f"stage {arguments.stage!r} of {arguments.run} has no final checkpoint; run make quickstart, or "
            f"name a finished stage before dsa with --stage"
        )
    manifest = read_manifest(checkpoint)
    quick = arguments.quick
    return Study(
        checkpoint=str(checkpoint),
        tokenizer=str(arguments.run / TOKENIZER_FILE),
        weights=manifest.files["model.safetensors"].sha256,
        window=arguments.window,
        base_steps=2 if quick else arguments.base_steps,
        steps=2 if quick else arguments.steps,
        first_steps=1 if quick else arguments.steps // 4,
        context=512 if quick else arguments.context,
        tokens_per_step=1024 if quick else arguments.tokens_per_step,
        lr=arguments.lr,
        lengths=(256, 512) if quick else tuple(arguments.lengths),
        texts=2 if quick else arguments.texts,
        keys=arguments.keys,
        search_length=512 if quick else arguments.search_length,
        beam=arguments.beam,
        rotates=arguments.rotate,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, default=Path("runs/quickstart"), help="a finished run; is only read"
    )
    parser.add_argument(
        "--stage", default="midtrain", help="whose final checkpoint; one before dsa"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/attention"), help="where results go")
    parser.add_argument("--seeds", type=natural, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--window", type=positive, default=256, help="[tokens]")
    parser.add_argument(
        "--converted", type=positive, help="layers that are replaced; default: half of them"
    )
    parser.add_argument("--beam", type=positive, default=4)
    parser.add_argument(
        "--search-length", type=positive, default=1024, help="texts of the search [tokens]"
    )
    parser.add_argument(
        "--base-steps",
        type=natural,
        default=200,
        help="steps in which the checkpoint learns to find needles",
    )
    parser.add_argument(
        "--steps", type=positive, default=60, help="optimizer steps of each variant"
    )
    parser.add_argument(
        "--context", type=positive, default=2048, help="longest training text [tokens]"
    )
    parser.add_argument("--tokens-per-step", type=positive, default=8192)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[256, 512, 1024, 2048, 4000])
    parser.add_argument("--texts", type=positive, default=16, help="texts of each kind and length")
    parser.add_argument("--keys", type=positive, default=4, help="keys there are in a text")
    parser.add_argument(
        "--rotate", action="store_true", help="gdn and simple-gdn rotate queries and keys"
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, help="cells computed at once, one thread each"
    )
    parser.add_argument("--quick", action="store_true", help="small, to see whether it runs")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    try:
        study = study_of(arguments)
        out: Path = arguments.out
        out.mkdir(parents=True, exist_ok=True)
        study = with_base(study, out)
        num_layers = load(study)[0].config.num_hidden_layers
        pattern, steps = search(study, out, arguments.converted or num_layers // 2)
    except LongArcError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for number, step in enumerate(steps, start=1):
        kept = ", ".join(f"{p.layers} {p.score:.3f}" for p in step.kept)
        print(f"search step {number}: {step.num_scored} patterns; kept {kept}", flush=True)
    study = replace(study, searched=pattern)
    results = Results(out / "results.json", study)
    cells = [Cell(variant=v, seed=None) for v in UNTRAINED if v in arguments.variants]
    cells += [Cell(variant=v, seed=s) for s in arguments.seeds for v in arguments.variants]
    missing = [cell for cell in cells if cell.name not in results.cells]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        computed = {cell: pool.submit(run_cell, study, cell) for cell in missing}
        for cell, future in computed.items():
            results.put(cell, future.result())
            shown = " ".join(
                f"{mean_score(results.cells[cell.name], n):.1f}" for n in study.lengths
            )
            print(f"{cell.name}: {shown}", flush=True)
    lines = table(results, study, arguments.seeds)
    write_atomically(out / "table.md", ("\n".join(lines) + "\n").encode())
    draw(results, study, arguments.seeds, out / "scores.png")
    print("\n".join(lines))
    load_average = os.getloadavg()[0]
    print(
        f"load average {load_average:.1f}; {out / 'results.json'}, {out / 'table.md'}, {out / 'scores.png'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
