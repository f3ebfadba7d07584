"""Where text becomes ids, and how conversations are written."""

import datetime
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from longarc.config.format_names import format_name
from longarc.config.settings import Settings


class TokenizerConfig(Settings):
    """Where text becomes ids."""

    vocab_size: int = Field(2048, ge=300)
    """Size of the byte-level BPE that pretrain trains, special tokens included [tokens]."""
    training_bytes: int = Field(4_000_000, ge=1000)
    """Text the BPE is trained on [bytes]."""
    path: str | None = None
    """An existing tokenizer.json to use instead of training one."""
    chat_format: str = "glm-5"
    """How messages become tokens: ``glm-4.5``, ``glm-4.7``, ``glm-5`` (which is the same), ``glm-5.2``, ``chatml``;
    ``template`` for the model's own Jinja template; or ``package.module:name`` of a ChatFormat or of a Renderer of the
    package ``renderers``."""
    template: str | None = None
    """With ``template``: a Jinja file, a tokenizer_config.json or a directory with one of them; None looks beside
    ``path``. The run keeps a copy."""
    template_values: dict[str, Any] = Field(default_factory=dict)
    """With ``template``: further variables of the template, over those that LongArc gives it."""
    template_date: datetime.date | None = None
    """With ``template``: the day that its ``strftime_now`` tells, so that a run is the same on every day; None leaves
    the function undefined, and many templates then have a date of their own."""

    @field_validator("chat_format")
    @classmethod
    def _is_a_format(cls, name: str) -> str:
        return format_name(name)

    @model_validator(mode="after")
    def _template_settings_have_an_effect(self) -> Self:
        if self.chat_format == "template":
            if self.template is None and self.path is None:
                raise ValueError(
                    "chat_format 'template' needs a template: set tokenizer.template, or tokenizer.path where the "
                    "template lies beside the tokenizer"
                )
            return self
        given = [n for n in ("template", "template_values", "template_date") if getattr(self, n)]
        if given:
            raise ValueError(
                f"tokenizer.{given[0]} is set, but chat_format is {self.chat_format!r}, which reads no template; "
                f'leave it out or set chat_format = "template"'
            )
        return self
