"""Look at models, and turn checkpoints into Hugging Face directories and back.

info     count the parameters of a recipe (.toml), a Hugging Face directory, a checkpoint or a run
convert  write a run's stage as a Hugging Face directory that transformers loads
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longarc.cli._exit import ExitCode

if TYPE_CHECKING:
    from longarc.config.model import ModelConfig

SUMMARY = "count, inspect and convert models"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="name the family, count parameters, memory and FLOPs")
    info.add_argument(
        "source", type=Path, help="a recipe, Hugging Face directory, checkpoint or run"
    )
    convert = actions.add_parser("convert", help="write a Hugging Face directory")
    convert.add_argument("run_dir", type=Path, metavar="RUN")
    convert.add_argument("target", type=Path, metavar="DIRECTORY", help="new or empty directory")
    convert.add_argument("--stage", required=True, help="whose final checkpoint")
    convert.add_argument(
        "--int4-group-size",
        type=int,
        metavar="N",
        help="round the routed experts to INT4, in groups of N numbers: the stage's int4_group_size",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    if arguments.action == "info":
        return _info(arguments.source)
    return _convert(
        arguments.run_dir,
        arguments.target,
        stage=arguments.stage,
        int4_group_size=arguments.int4_group_size,
    )


def _info(source: Path) -> int:
    from longarc.models.census import take_census

    config = _config_of(source)
    census = take_census(config)
    print(f"family                 {config.family}")
    print(f"parameters             {census.num_parameters:,}")
    print(f"active per token       {census.num_active_parameters:,}")
    print(f"weights in fp32        {census.num_parameters * 4 / 2**20:,.1f} MiB")
    print(f"cache per token, fp32  {census.num_cache_values_per_token * 4:,} bytes")
    print(
        f"forward per token      {census.num_flops_per_token:,} FLOP (without attention over the context)"
    )
    return ExitCode.OK


def _config_of(source: Path) -> "ModelConfig":
    import orjson

    from longarc.cli._recipe import load_recipe, recipe_of_run
    from longarc.errors import ConfigError
    from longarc.models.hf_config import config_from_hf
    from longarc.runs.checkpoint import MANIFEST, read_manifest
    from longarc.runs.directory import RECIPE

    if source.suffix == ".toml":
        return load_recipe(source, []).model
    if (source / MANIFEST).is_file():
        from longarc.pipeline.workspace import model_config

        return model_config(read_manifest(source).model)
    if (source / RECIPE).is_file():
        return recipe_of_run(source).model
    if (source / "config.json").is_file():
        return config_from_hf(orjson.loads((source / "config.json").read_bytes()))
    raise ConfigError(
        f"{source} is no recipe (.toml), checkpoint ({MANIFEST}), run ({RECIPE}) or Hugging Face directory (config.json)"
    )


def _convert(run_dir: Path, target: Path, *, stage: str, int4_group_size: int | None) -> int:
    import shutil

    from longarc.errors import CheckpointError, ConfigError
    from longarc.models.hf_weights import save_pretrained_dir
    from longarc.pipeline.workspace import TOKENIZER_FILE, load_checkpoint
    from longarc.runs.directory import RunDirectory

    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; give a new directory")
    run = RunDirectory.look(run_dir)
    checkpoint = run.stage(stage).final()
    if checkpoint is None:
        raise CheckpointError(
            f"stage {stage!r} of {run_dir} has no final checkpoint; stages with files: {run.stages()}"
        )
    if int4_group_size is not None and int4_group_size < 1:
        raise ConfigError(f"--int4-group-size {int4_group_size}: a group holds at least one number")
    save_pretrained_dir(
        load_checkpoint(checkpoint).model,
        target,
        experts="separate" if int4_group_size is None else "int4",
        int4_group_size=int4_group_size or 0,
    )
    shutil.copy(run_dir / TOKENIZER_FILE, target / TOKENIZER_FILE)
    print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    return ExitCode.OK
