"""Where a chat template comes from: the files beside a checkpoint's tokenizer, and a run's own copy of them."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from longarc.errors import ConfigError, boundary
from longarc.records.message import Json
from longarc.runs.files import write_atomically
from longarc.tokens.jinja_template import ChatTemplate
from longarc.tokens.template_format import TemplateFormat
from longarc.tokens.tokenizer import Tokenizer

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSource:
    """A template with everything it reads beside the conversation."""

    template: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """``bos_token``, ``eos_token`` and the like."""
    values: Mapping[str, Json] = field(default_factory=dict)
    """Further variables."""
    date: datetime.date | None = None
    """What ``strftime_now`` tells."""

    @classmethod
    def read(
        cls, path: Path, *, values: Mapping[str, Json], date: datetime.date | None
    ) -> "TemplateSource":
        """Read a template.

        Args:
            path: a Jinja file, a tokenizer_config.json, or a directory that holds one of them. Special tokens come
                from the tokenizer_config.json in the same place, if there is one.
            values: further variables.
            date: what ``strftime_now`` tells.

        Raises:
            ConfigError: there is no template.
        """
        directory = path if path.is_dir() else path.parent
        config_path = path if path.suffix == ".json" else directory / CONFIG_FILE
        config: dict[str, Any] = {}
        if config_path.is_file():
            with boundary(ConfigError, f"cannot read {config_path}"):
                config = dict(orjson.loads(config_path.read_bytes()))
        elif path.suffix == ".json":
            raise ConfigError(f"there is no chat template: {path} does not exist")
        jinja = directory / TEMPLATE_FILE if path.is_dir() else path
        if path.suffix != ".json" and jinja.is_file():
            with boundary(ConfigError, f"cannot read {jinja}"):
                template = jinja.read_text(encoding="utf-8")
        else:
            template = _template_of(config)
        if not template:
            raise ConfigError(
                f"there is no chat template at {path}: give tokenizer.template a Jinja file, or a "
                f"{CONFIG_FILE} that has a chat_template"
            )
        return cls(
            template=template,
            special_tokens=_special_tokens(config),
            values=dict(values),
            date=date,
        )

    @classmethod
    def load(cls, path: Path) -> "TemplateSource":
        """Read what ``save`` wrote.

        Raises:
            ConfigError: it is damaged.
        """
        with boundary(ConfigError, f"cannot read the run's chat template {path}"):
            data = orjson.loads(path.read_bytes())
            date = data["date"]
            return cls(
                template=data["template"],
                special_tokens=data["special_tokens"],
                values=data["values"],
                date=None if date is None else datetime.date.fromisoformat(date),
            )

    def save(self, path: Path) -> None:
        """Write a copy that ``load`` reads."""
        data = {
            "template": self.template,
            "special_tokens": dict(self.special_tokens),
            "values": self.values,
            "date": None if self.date is None else self.date.isoformat(),
        }
        write_atomically(path, orjson.dumps(data, option=orjson.OPT_INDENT_2))

    def chat_format(self, tokenizer: Tokenizer) -> TemplateFormat:
        """Return the template as a chat format over the tokenizer of its model."""
        template = ChatTemplate(
            self.template,
            control_tokens=tokenizer.special_tokens,
            special_tokens=self.special_tokens,
            values=self.values,
            date=self.date,
        )
        eos = self.special_tokens.get("eos_token")
        return TemplateFormat(
            tokenizer, template, eos_token=eos if eos in tokenizer.special_tokens else None
        )


def _template_of(config: Mapping[str, Any]) -> str:
    """Return the template of a tokenizer_config.json, which may hold several by name."""
    template = config.get("chat_template", "")
    if isinstance(template, list):
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default", "")
    return str(template or "")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
