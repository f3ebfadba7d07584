"""What ``longarc models info`` counts: the ``config.json`` that a source has or would be given."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longarc.config.recipe import Recipe


def hf_config_of(source: Path) -> Mapping[str, Any]:
    """Return the content of the ``config.json`` of a recipe, checkpoint, run, file or directory.

    Raises:
        ConfigError: the source is none of them, or has a model that Hugging Face has no config for.
        CheckpointError: a checkpoint's manifest is damaged.
    """
    from longarc.cli._recipe import load_recipe, recipe_of_run
    from longarc.errors import ConfigError
    from longarc.runs.checkpoint import MANIFEST
    from longarc.runs.directory import RECIPE

    if source.suffix == ".toml":
        return _of_recipe(load_recipe(source, []))
    if (source / MANIFEST).is_file():
        return _of_checkpoint(source)
    if (source / RECIPE).is_file():
        return _of_run(source, recipe_of_run(source))
    for path in (source, source / "config.json"):
        if path.suffix == ".json" and path.is_file():
            return _read_json_object(path)
    raise ConfigError(
        f"{source} is no recipe (.toml), checkpoint ({MANIFEST}), run ({RECIPE}), config.json or "
        f"Hugging Face directory (config.json)"
    )


def _of_recipe(recipe: "Recipe") -> Mapping[str, Any]:
    from longarc.errors import ConfigError
    from longarc.models.hf_config import config_to_hf

    if recipe.initial is None:
        return config_to_hf(recipe.model, dtype="float32")
    path = Path(recipe.initial.path) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"initial.path = {recipe.initial.path!r} decides the shape of the model, but {path} does not exist; "
            f"fetch the weights first, or call this where the path leads to them"
        )
    return _read_json_object(path)


def _of_run(run_dir: Path, recipe: "Recipe") -> Mapping[str, Any]:
    """Ask the weights that a run began with before the directory they came from, which may have moved."""
    from longarc.config.recipe import INITIAL
    from longarc.runs.directory import RunDirectory

    imported = RunDirectory.look(run_dir).stage(INITIAL).final()
    return _of_recipe(recipe) if imported is None else _of_checkpoint(imported)


def _of_checkpoint(checkpoint: Path) -> Mapping[str, Any]:
    from longarc.models.hf_config import config_to_hf
    from longarc.pipeline.workspace import model_config
    from longarc.runs.checkpoint import read_manifest

    return config_to_hf(model_config(read_manifest(checkpoint).model), dtype="float32")


def _read_json_object(path: Path) -> Mapping[str, Any]:
    import orjson

    from longarc.errors import ConfigError

    try:
        content = orjson.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON: {error}; give a config.json of Hugging Face"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a JSON {type(content).__name__}, but a config.json is an object"
        )
    return content
