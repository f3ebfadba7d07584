from collections import Counter
from itertools import islice

import pytest

from longarc.data.sft import Expert, ExpertShare, conversation_document, conversations
from longarc.envs.tasks.files import Files
from longarc.envs.tasks.format import Format
from longarc.envs.tasks.reasoning import Reasoning
from longarc.envs.tasks.recall import Recall
from longarc.errors import ConfigError, ContractError
from longarc.records.conversation import Conversation
from longarc.records.message import Message, Role
from longarc.tokens.chat_format import RenderedChat

EXPERTS = {
    "files": ExpertShare(expert=Files(), share_frac=2.0),
    "format": ExpertShare(expert=Format(), share_frac=1.0),
}


class SpellingFormat:
    """One id per character; assistant text is trained unless it is marked."""

    def render(
        self, messages, tools=(), *, thinking, clear_thinking, add_generation_prompt, untrained=()
    ):
        ids, mask = [], []
        for position, message in enumerate(messages):
            ids += map(ord, message.content)
            is_trained = message.role is Role.ASSISTANT and position not in untrained
            mask += [is_trained] * len(message.content)
        assert not add_generation_prompt
        return RenderedChat(token_ids=tuple(ids), train_mask=tuple(mask))


@pytest.mark.parametrize("kind", [Files, Format, Reasoning, Recall])
def test_every_family_is_an_expert(kind):
    assert isinstance(kind(), Expert)


def test_shares_are_kept_and_a_cursor_goes_on_in_the_middle():
    whole = list(islice(conversations(EXPERTS, cursor=0, error_frac=0.2), 600))
    assert list(islice(conversations(EXPERTS, cursor=590, error_frac=0.2), 10)) == whole[590:]
    counts = Counter(c.family for c in whole)
    assert 0.6 < counts["files"] / 600 < 0.73
    assert len({str(c.messages) for c in whole}) >= 598


def test_the_share_of_mistakes_is_kept():
    only_files = {"files": EXPERTS["files"]}
    shown = islice(conversations(only_files, cursor=0, error_frac=0.25), 800)
    assert 0.2 < sum(bool(c.untrained) for c in shown) / 800 < 0.3
    clean = islice(conversations(only_files, cursor=0, error_frac=0.0), 100)
    assert not any(c.untrained for c in clean)


def test_nobody_to_imitate_and_shares_of_nothing_are_refused():
    with pytest.raises(ConfigError, match="no expert"):
        next(conversations({}, cursor=0, error_frac=0.0))
    nothing = {"files": ExpertShare(expert=Files(), share_frac=0.0)}
    with pytest.raises(ConfigError, match="must be positive"):
        next(conversations(nothing, cursor=0, error_frac=0.0))


def test_a_mistake_is_in_the_document_but_not_trained_on():
    conversation = Conversation(
        messages=(
            Message(role=Role.USER, content="ab"),
            Message(role=Role.ASSISTANT, content="bad"),
            Message(role=Role.TOOL, content="no"),
            Message(role=Role.ASSISTANT, content="good"),
        ),
        untrained=frozenset({1}),
    )
    document = conversation_document(conversation, SpellingFormat(), max_tokens=11)
    assert "".join(map(chr, document.token_ids)) == "abbadnogood"
    assert document.train_mask == (False,) * 7 + (True,) * 4


def test_a_conversation_that_does_not_fit_is_refused_whole():
    conversation = Files().demonstration(0)
    with pytest.raises(ConfigError, match=r"'files' has .* tokens, the stage allows 5"):
        conversation_document(conversation, SpellingFormat(), max_tokens=5)


@pytest.mark.parametrize("position", [0, 7, -1])
def test_only_assistant_messages_can_be_marked_untrained(position):
    messages = (Message(role=Role.USER, content="a"), Message(role=Role.ASSISTANT, content="b"))
    with pytest.raises(ContractError, match="untrained message"):
        Conversation(messages=messages, untrained=frozenset({position}))
