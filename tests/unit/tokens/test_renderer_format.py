"""A Renderer as a chat format. The fake below keeps the package's contract; the real one is in tests/integration."""

from dataclasses import dataclass, field, replace

import pytest

from longarc.errors import ConfigError
from longarc.tokens.chat_format import ChatFormat, StoredTurn
from longarc.tokens.formats import make_chat_format
from longarc.tokens.renderer_format import Renderer, RendererFormat, RendererTokenizer
from token_samples import BASH, assistant, call, qwen_tokenizer, system, tool, user

TOKENIZER = qwen_tokenizer()
END = TOKENIZER.special_id("<|im_end|>")


@dataclass
class Rendered:
    token_ids: list[int] = field(default_factory=list)
    message_indices: list[int] = field(default_factory=list)
    sampled_mask: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Config:
    enable_thinking: bool = True

    def model_copy(self, *, update):
        return replace(self, **update)


@dataclass
class Parsed:
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: list[object] = field(default_factory=list)


@dataclass
class ParsedCall:
    raw: str
    name: str | None
    arguments: object
    status: str = "ok"


class Short:
    """Writes ``user:TEXT<|im_end|>`` and so on; its answers say nothing of reasoning."""

    def __init__(self, tokenizer, config=None):
        self.tokenizer, self.config = tokenizer, config or Config()
        self.parsed = Parsed()
        self.bridge = "honest"

    def render(self, messages, *, tools=None, add_generation_prompt=False):
        out = Rendered()
        for index, message in enumerate(messages):
            for text, sampled in (
                (f"{message['role']}:", False),
                (message["content"] + "<|im_end|>", message["role"] == "assistant"),
            ):
                ids = self.tokenizer.encode(text)
                out.token_ids += ids
                out.message_indices += [index] * len(ids)
                out.sampled_mask += [sampled] * len(ids)
        if add_generation_prompt:
            ids = self.tokenizer.encode(f"assistant:{'' if self.config.enable_thinking else '-'}")
            out.token_ids += ids
            out.message_indices += [-1] * len(ids)
            out.sampled_mask += [False] * len(ids)
        return out

    def parse_response(self, token_ids, *, tools=None, prompt_ids=None):
        return self.parsed

    def get_stop_token_ids(self):
        return [END]

    def bridge_to_next_turn(self, prompt_ids, completion_ids, new_messages, *, tools=None):
        if self.bridge == "none" or any(m["role"] == "assistant" for m in new_messages):
            return None
        stored = [*prompt_ids, *completion_ids]
        if self.bridge == "trims":
            stored = stored[:-1]
        return Rendered(
            token_ids=stored + self.render(new_messages, add_generation_prompt=True).token_ids
        )


class Mute(Short):
    """As the package's default Renderer: it does not say what is sampled."""

    def render(self, messages, **options):
        return replace(super().render(messages, **options), sampled_mask=[])


class Roles(Short):
    """The next message brings the token that ends an answer."""

    def render(self, messages, *, tools=None, add_generation_prompt=False):
        out = Rendered()
        for index, message in enumerate(messages):
            follows = index > 0 and messages[index - 1]["role"] == "assistant"
            ids = ([END] if follows else []) + self.tokenizer.encode(message["content"])
            out.token_ids += ids
            out.message_indices += [index - 1 if follows else index] + [index] * (len(ids) - 1)
            out.sampled_mask += [
                message["role"] == "assistant" or (follows and n == 0) for n in range(len(ids))
            ]
        return out


def format_of(kind=Short):
    return RendererFormat(TOKENIZER, kind(RendererTokenizer(TOKENIZER)))


def text_of(ids):
    return TOKENIZER.decode(list(ids), keep_special=True)


def test_a_renderer_is_a_chat_format():
    assert isinstance(Short(None), Renderer)
    assert isinstance(format_of(), ChatFormat)


def test_what_the_renderer_says_is_sampled_is_trained_and_nothing_of_untrained_answers():
    messages = [system("s"), user("q"), assistant("A"), user("p"), assistant("B")]
    chat = format_of().render(messages, thinking=True, add_generation_prompt=False, untrained={2})
    assert text_of(chat.token_ids) == (
        "system:s<|im_end|>user:q<|im_end|>assistant:A<|im_end|>user:p<|im_end|>assistant:B<|im_end|>"
    )
    ids = [i for i, m in zip(chat.token_ids, chat.train_mask, strict=True) if m]
    assert text_of(ids) == "B<|im_end|>"


def test_the_token_that_ends_the_last_answer_is_added_where_only_a_next_message_brings_it():
    for last in (assistant("A"), assistant("A", calls=(call("bash"),))):
        chat = format_of(Roles).render(
            [user("q"), last], thinking=True, add_generation_prompt=False
        )
        assert text_of(chat.token_ids) == "qA<|im_end|>"
        assert chat.train_mask[-1]


def test_a_renderer_that_does_not_say_what_is_sampled_gives_prompts_but_nothing_to_train():
    mute = format_of(Mute)
    assert mute.render([user("q")], thinking=True, add_generation_prompt=True).token_ids
    with pytest.raises(ConfigError, match="sampled_mask is empty"):
        mute.render([user("q"), assistant("A")], thinking=True, add_generation_prompt=False)


def test_thinking_is_the_renderers_own_setting_made_for_each_value():
    chat_format = format_of()
    prompts = [
        text_of(chat_format.render([], thinking=t, add_generation_prompt=True).token_ids)
        for t in (True, False, True)
    ]
    assert prompts == ["assistant:", "assistant:-", "assistant:"]


@dataclass(frozen=True)
class Forgetting(Config):
    thinking_retention: str | None = None


@pytest.mark.parametrize(
    ("own", "clear_thinking", "asked"),
    [(None, False, "all"), (None, True, None), ("tool_cycle", False, "tool_cycle")],
)
def test_a_renderer_that_leaves_it_open_keeps_reasoning_where_the_session_does(
    own, clear_thinking, asked
):
    made = []

    class Kept(Short):
        def bridge_to_next_turn(self, *arguments, **options):
            made.append(self.config.thinking_retention)
            return super().bridge_to_next_turn(*arguments, **options)

    view = RendererTokenizer(TOKENIZER)
    chat_format = RendererFormat(TOKENIZER, Kept(view, Forgetting(thinking_retention=own)))
    stored = replace(turn(), clear_thinking=clear_thinking)
    assert chat_format.tail_after(stored, [user("p")], thinking=True) is not None
    assert made == [asked]


def turn(*, tools=(BASH,)):
    return StoredTurn(
        prompt_ids=(1, 2),
        sampled_ids=(3, END),
        messages=[user("q"), assistant("A", calls=(call("bash"),))],
        tools=tools,
    )


def test_a_tail_is_what_the_bridge_adds():
    tail = format_of().tail_after(turn(), [tool("r")], thinking=True)
    assert text_of(tail) == "tool:r<|im_end|>assistant:"


@pytest.mark.parametrize(("bridge", "reason"), [("none", "no bridge"), ("trims", "stored ids")])
def test_a_bridge_that_is_missing_or_breaks_its_contract_means_a_new_branch(bridge, reason):
    chat_format = format_of()
    chat_format._renderer.bridge = bridge
    assert chat_format.tail_after(turn(), [tool("r")], thinking=True) is None
    assert (chat_format.rewrites.num, reason in chat_format.rewrites.explain()) == (1, True)


def test_every_attempt_at_a_call_comes_back_and_bad_ones_say_why():
    chat_format = format_of()
    chat_format._renderer.parsed = Parsed(
        content=" text ",
        reasoning_content="why",
        tool_calls=[
            ParsedCall("{", "bash", None, status="invalid_json"),
            ParsedCall("", "bash", {"command": "ls"}),
            ParsedCall("", "ghost", {"a": 1}, status="unknown_tool"),
            ParsedCall("", "bash", '{"command": "pwd"}'),
        ],
    )
    parsed = chat_format.parse([1], [BASH], thinking=True, call_id_prefix="c")
    message = parsed.message
    assert (message.content, message.reasoning) == ("text", "why")
    assert [(c.id, c.name, c.arguments, c.error is None) for c in message.tool_calls] == [
        ("c_0", "bash", {}, False),
        ("c_1", "bash", {"command": "ls"}, True),
        ("c_2", "ghost", {"a": 1}, True),
        ("c_3", "bash", {"command": "pwd"}, True),
    ]
    assert len(parsed.problems) == 1


def test_a_renderer_that_fails_is_an_error_of_the_conversation():
    broken = format_of()
    broken._renderer.render = None
    with pytest.raises(ConfigError, match="refuses this conversation"):
        broken.render([user("q")], thinking=True, add_generation_prompt=True)


def test_the_tokenizer_view_is_what_renderers_use():
    view = RendererTokenizer(TOKENIZER)
    ids = view.encode("a<|im_end|>", add_special_tokens=False)
    assert ids[-1] == END == view.convert_tokens_to_ids("<|im_end|>")
    assert view.convert_tokens_to_ids(["<|im_end|>", "no"]) == [END, None]
    assert (view.decode(ids), view.decode(ids, skip_special_tokens=True)) == ("a<|im_end|>", "a")
    assert view.eos_token_id == TOKENIZER.special_id("<|endoftext|>")


# By import path


def own_format(tokenizer):
    return make_chat_format("chatml", tokenizer)


def own_renderer(tokenizer):
    return Short(RendererTokenizer(tokenizer))


def something_else(tokenizer):
    return 3


@pytest.mark.parametrize("name", ["Short", "own_renderer", "own_format"])
def test_a_format_comes_by_import_path_of_a_class_or_a_function(name):
    made = make_chat_format(f"{__name__}:{name}", TOKENIZER)
    assert isinstance(made, ChatFormat)
    assert made.render([user("q")], thinking=True, add_generation_prompt=True).token_ids


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("glm-7", "no chat format 'glm-7'"),
        (f"{__name__}:something_else", "neither a ChatFormat"),
        (f"{__name__}:nothing", "has no 'nothing'"),
        ("template", "needs a template"),
    ],
)
def test_what_is_no_format_is_refused(name, reason):
    with pytest.raises(ConfigError, match=reason):
        make_chat_format(name, TOKENIZER)
