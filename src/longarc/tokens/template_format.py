"""Any Hugging Face chat template as a chat format, checked at every call.

What a template does is found out rather than believed. When the format is made, the template renders a few
conversations, which show what ends a turn, whether the prompt opens the reasoning, and how calls are written. And
before a stored turn is continued, the template renders the longer conversation: only where that begins with the
prompt of the turn, and the turn in it still says what was said, do the stored ids stay. Otherwise the conversation
is rendered whole, as a new branch, which the log says once.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Final, Literal

from longarc.errors import ConfigError
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import dump_json
from longarc.tokens.chat_format import (
    ParsedTurn,
    RenderedChat,
    Rewrites,
    StoredTurn,
    StreamedTags,
    TokenWriter,
)
from longarc.tokens.glm_parse import GLM_TAGS, GlmParser
from longarc.tokens.jinja_template import ChatTemplate, TemplateText
from longarc.tokens.tagged_json import parse_tagged
from longarc.tokens.tokenizer import Tokenizer

_ANSWER: Final = "the-answer-of-a-probe"
_TOOL: Final = ToolSpec(
    name="probe",
    description="Nothing.",
    parameters={"type": "object", "properties": {"word": {"type": "string"}}},
)
_CALL: Final = ToolCall(id="callprobe", name="probe", arguments={"word": _ANSWER})
_QUESTION: Final = Message(role=Role.USER, content="q")
_SAID: Final = Message(role=Role.ASSISTANT, content=_ANSWER)
_CALLED: Final = Message(role=Role.ASSISTANT, content="", tool_calls=(_CALL,))
_RESULT: Final = Message(role=Role.TOOL, content="r", tool_call_id=_CALL.id)


class TemplateFormat:
    """A chat format that a template defines; see ``ChatFormat`` for what the methods mean.

    The mask of a prompt (``add_generation_prompt``) is all False: who asks for one does not train on it, and working
    it out costs two renders for each answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, eos_token: str | None = None
    ) -> None:
        """Find out how the template writes.

        Args:
            tokenizer: the tokenizer of the template's model.
            template: compiled with this tokenizer's control tokens.
            eos_token: ends a turn too, whatever the template writes.

        Raises:
            ConfigError: the template cannot render a question and an answer, or nothing ends the answer.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._opens_thinking = {
            thinking: self._text([_QUESTION], thinking=thinking).rstrip().endswith("<think>")
            for thinking in (True, False)
        }
        has_glm_tags = tokenizer.special_tokens.keys() >= set(GLM_TAGS)
        self._glm_parser = (
            GlmParser(
                tokenizer,
                strips_reasoning=True,
                model_opens_thinking=not self._opens_thinking[True],
            )
            if has_glm_tags
            else None
        )
        self._calls = self._how_calls_are_read()
        self._answer_end = self._end_of_probe([_QUESTION, _SAID]) or self._end_of_probe(
            [_QUESTION, _SAID, _QUESTION]
        )
        self._call_end = (
            self._end_of_probe([_QUESTION, _CALLED, _RESULT], tools=[_TOOL])
            if self._calls
            else None
        )
        ends = (self._answer_end, self._call_end, eos_token)
        self._stops = {end: tokenizer.special_id(end) for end in ends if end is not None}
        if not self._stops:
            raise ConfigError(
                "the chat template writes no control token behind an answer, so nothing would end a turn; name the "
                "eos_token in its tokenizer_config.json"
            )
        self.rewrites = Rewrites(self.name)
        """Turns that the template did not continue."""

    @property
    def name(self) -> str:
        """``template``; the conversation's opening tells two templates apart."""
        return "template"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the format writes with."""
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What the template writes behind answers and calls, and the end-of-text token."""
        return tuple(dict.fromkeys(self._stops.values()))

    @property
    def streamed_tags(self) -> StreamedTags | None:
        """As the calls are read; None where the prompt opens the reasoning even without thinking."""
        if self._opens_thinking[False]:
            return None
        return StreamedTags(
            by_id=self._calls == "glm",
            strips_reasoning=True,
            opens_thinking=self._opens_thinking[True],
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool,
        clear_thinking: bool = True,
        add_generation_prompt: bool,
        untrained: Collection[int] = (),
    ) -> RenderedChat:
        """Render a whole conversation; see ``ChatFormat.render``.

        Raises:
            ConfigError: the template refuses the conversation, its calls are in a form that is not read, or it
                does not tell which tokens an answer is.
        """
        if tools and self._calls is None:
            raise ConfigError(
                "the chat template shows no tools, or writes calls in a form that is not read (JSON or GLM's XML "
                "inside <tool_call>). Leave the tools out, or give chat_format the import path of a format that "
                "reads them"
            )
        whole = self._template.render(
            messages,
            tools,
            thinking=thinking,
            clear_thinking=clear_thinking,
            add_generation_prompt=add_generation_prompt,
        )
        if add_generation_prompt:
            return self._ids(whole.text)
        spans = self._spoken(messages, tools, whole, thinking, clear_thinking)
        text = whole.text
        if spans and messages[-1].role is Role.ASSISTANT and spans[-1][1] == len(text):
            end = self._call_end if messages[-1].tool_calls else self._answer_end
            last = text[spans[-1][0] :]
            if not any(last.endswith(stop) for stop in self._stops):
                text += end or next(iter(self._stops))
                spans[-1] = (spans[-1][0], len(text))
        assistants = [i for i, message in enumerate(messages) if message.role is Role.ASSISTANT]
        return self._ids(
            text, [s for i, s in zip(assistants, spans, strict=True) if i not in untrained]
        )

    def tail_after(
        self, turn: StoredTurn, messages: Sequence[Message], *, thinking: bool
    ) -> tuple[int, ...] | None:
        """Render what follows a stored turn; None where the template would show that turn otherwise."""
        opened, whole = (
            self._template.render(
                conversation,
                turn.tools,
                thinking=thinking,
                clear_thinking=turn.clear_thinking,
                add_generation_prompt=True,
            ).text
            for conversation in (turn.messages[:-1], [*turn.messages, *messages])
        )
        if not whole.startswith(opened):
            self.rewrites.add("it changes what stood before the answer")
            return None
        end = self._first_stop(whole, len(opened))
        if end is None:
            self.rewrites.add("it does not close the answer")
            return None
        if lost := self._left_out(turn.messages[-1], whole[len(opened) : end.start()]):
            self.rewrites.add(f"it leaves out the {lost} of the answer")
            return None
        is_closed = turn.stop_id(self.stop_ids) == self._stops[end[0]]
        return self._ids(whole[end.end() if is_closed else end.start() :]).token_ids

    def call_opening(self, name: str | None, *, thinking: bool) -> tuple[int, ...] | None:
        """Return the ids that begin a call; None where calls are in a form that is not read."""
        if self._calls is None:
            return None
        text = "\n</think>\n\n" if self._opens_thinking[thinking] else ""
        marked = self._template.marked(name or "")
        if self._calls == "glm":
            return self._ids(f"{text.strip()}<tool_call>{marked}").token_ids
        begun = '"' if name is None else f'{dump_json(marked)}, "arguments": '
        return self._ids(f'{text}<tool_call>\n{{"name": {begun}').token_ids

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool,
        call_id_prefix: str = "call",
    ) -> ParsedTurn:
        """Read a completion; see ``ChatFormat.parse``."""
        is_stopped = bool(token_ids) and token_ids[-1] in self.stop_ids
        body = token_ids[:-1] if is_stopped else token_ids
        if self._calls == "glm":
            assert self._glm_parser is not None
            return self._glm_parser.parse(
                body, tools, thinking=thinking, call_id_prefix=call_id_prefix
            )
        return parse_tagged(
            self._tokenizer.decode(body, keep_special=True),
            prompt_opens_thinking=self._opens_thinking[thinking],
            call_id_prefix=call_id_prefix,
        )

    # What the template does

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        return self._template.render(
            messages,
            tools,
            thinking=thinking,
            clear_thinking=False,
            add_generation_prompt=add_generation_prompt,
        ).text

    def _end_of_probe(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> str | None:
        """Return the control token that ends the turn of a probe; None where there is none."""
        text = self._probe(messages, tools)
        if text is None or _ANSWER not in text:
            return None
        start = text.rindex(_ANSWER) + len(_ANSWER)
        tags = {*GLM_TAGS, "<tool_response>", "</tool_response>"}
        return next(
            (m[0] for m in self._template.control.finditer(text, start) if m[0] not in tags), None
        )

    def _probe(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | None:
        """Render a conversation that not every template can have; None where this one cannot."""
        try:
            return self._text(messages, tools, add_generation_prompt=False)
        except ConfigError:
            if tools or len(messages) != 2:
                return None
            raise

    def _how_calls_are_read(self) -> Literal["tagged", "glm"] | None:
        """Return the reader that reads the template's own call back."""
        text = self._probe([_QUESTION, _CALLED, _RESULT], [_TOOL])
        before = self._probe([_QUESTION], [_TOOL])
        if text is None or before is None or _TOOL.name not in before:
            return None
        said = text[text.rfind("<tool_call>") :] if "<tool_call>" in text else ""
        said = said[: said.rfind("</tool_call>") + len("</tool_call>")]
        turn = parse_tagged(said, prompt_opens_thinking=False, call_id_prefix="call")
        if _same_calls(turn):
            return "tagged"
        if self._glm_parser is not None:
            ids = self._ids(said).token_ids
            turn = self._glm_parser.parse(ids, [_TOOL], thinking=False, call_id_prefix="call")
            return "glm" if _same_calls(turn) else None
        return None

    # Checks and masks

    def _left_out(self, answer: Message, shown: str) -> str | None:
        """Return what of an answer the template does not show."""
        parts = [
            ("reasoning", answer.reasoning or ""),
            ("content", answer.content),
            *(("calls", call.name) for call in answer.tool_calls),
        ]
        return next(
            (what for what, text in parts if self._template.marked(text.strip()) not in shown), None
        )

    def _first_stop(self, text: str, start: int) -> "re.Match[str] | None":
        found = self._template.control.finditer(text, start)
        return next((match for match in found if match[0] in self._stops), None)

    def _spoken(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        whole: TemplateText,
        thinking: bool,
        clear_thinking: bool,
    ) -> list[tuple[int, int]]:
        """Return [start, end) of what each answer says itself, with what ends it."""
        assistants = [i for i, message in enumerate(messages) if message.role is Role.ASSISTANT]
        if len(whole.generated) == len(assistants):
            starts = [start for start, _ in whole.generated]
            ends = [self._with_stop(whole.text, end) for _, end in whole.generated]
            return list(zip(starts, ends, strict=True))
        spans: list[tuple[int, int]] = []
        for index in assistants:
            before, opened = (
                self._template.render(
                    messages[:index],
                    tools,
                    thinking=thinking,
                    clear_thinking=clear_thinking,
                    add_generation_prompt=opens,
                ).text
                for opens in (False, True)
            )
            start = self._start(whole.text, before, opened)
            if start is None:
                raise ConfigError(
                    f"the chat template does not show which tokens message {index} is: with later messages it "
                    f"writes other text before it. Mark answers by {{% generation %}} in the template, train on "
                    f"conversations that end there, or name another chat_format"
                )
            stop = self._first_stop(whole.text, start)
            spans.append((start, len(whole.text) if stop is None else stop.end()))
        return spans

    def _with_stop(self, text: str, end: int) -> int:
        match = self._template.control.match(text, end)
        return match.end() if match is not None and match[0] in self._stops else end

    def _start(self, text: str, before: str, opened: str) -> int | None:
        """Return where an answer starts: behind its prompt, or behind what it has in common with it."""
        if text.startswith(opened):
            return len(opened)
        if not (opened.startswith(before) and text.startswith(before)):
            return None
        common = len(before)
        while common < min(len(text), len(opened)) and text[common] == opened[common]:
            common += 1
        tokens = (m.end() for m in self._template.control.finditer(text, len(before), common))
        start = max([text.rfind("\n", len(before), common) + 1, *tokens])
        return start if start > len(before) else None

    # Text to ids

    def _ids(self, text: str, spans: Sequence[tuple[int, int]] = ()) -> RenderedChat:
        """Encode what the template wrote; ``spans`` are what is trained."""
        out = TokenWriter(self._tokenizer)
        borders = sorted(chain.from_iterable(spans))

        def write(start: int, end: int) -> None:
            while start < end:
                passed = bisect_right(borders, start)
                stop = min([end, *borders[passed : passed + 1]])
                out.text(self._template.plain(text[start:stop]), trained=passed % 2 == 1)
                start = stop

        position = 0
        for match in self._template.control.finditer(text):
            write(position, match.start())
            out.special(match[0], trained=bisect_right(borders, match.start()) % 2 == 1)
            position = match.end()
        write(position, len(text))
        return out.finish()


def _same_calls(turn: ParsedTurn) -> bool:
    calls = [(call.name, call.arguments) for call in turn.message.tool_calls]
    return calls == [(_CALL.name, _CALL.arguments)]
