"""A tokenizer from a GGUF file cuts and merges text as llama.cpp's source says."""

import unicodedata
from dataclasses import replace
from itertools import pairwise

import pytest

from gguf_cases import CONTROL, MERGES, byte_alphabet, vocabulary
from longarc.errors import CheckpointError
from longarc.tokens.gguf_tokenizer import GgufVocabulary, TokenType, tokenizer_of

TOKENS = vocabulary()
VOCABULARY = GgufVocabulary(
    model="gpt2",
    rule="smollm",
    tokens=TOKENS,
    types=[TokenType.CONTROL if t in CONTROL else TokenType.NORMAL for t in TOKENS],
    merges=MERGES,
)


def is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] == "L"


def is_number(char: str) -> bool:
    return unicodedata.category(char)[0] == "N"


def is_other(char: str) -> bool:
    return not (char.isspace() or is_letter(char) or is_number(char))


def words_of(text: str) -> list[str]:
    """The rule: numbers alone; then contractions, a blank and letters, a blank and signs, runs of blanks."""
    words = []
    for piece in split_at_numbers(text):
        at = 0
        while at < len(piece):
            end = end_of_word(piece, at)
            words.append(piece[at:end])
            at = end
    return words


def split_at_numbers(text: str) -> list[str]:
    pieces = [""]
    for char in text:
        if is_number(char):
            pieces += [char, ""]
        else:
            pieces[-1] += char
    return [piece for piece in pieces if piece]


def end_of_word(text: str, at: int) -> int:
    for contraction in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if text.startswith(contraction, at):
            return at + len(contraction)
    first = at + (text[at] == " ")
    for kind in (is_letter, is_number, is_other):
        end = first
        while end < len(text) and kind(text[end]):
            end += 1
        if end > first:
            return end
    end = at
    while end < len(text) and text[end].isspace():
        end += 1
    return (
        end if end == len(text) or end == at + 1 else end - 1
    )  # the last blank goes to the next word


def merged(word: str) -> list[int]:
    alphabet = byte_alphabet()
    parts = [alphabet[byte] for byte in word.encode()]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    while True:
        pairs = [(ranks.get(pair, 99), i) for i, pair in enumerate(pairwise(parts))]
        if not pairs or min(pairs)[0] == 99:
            return [TOKENS.index(part) for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize(
    "text",
    [
        "the cat in the hat",
        "  the    end\n\n\n the",
        "it's the dog's 42nd bone; they'll say 3.14, won't they?",
        "tabs\tand\r\nlines \n \n",
        "Ünïcode, 漢字 and ½ of ²",
        "code(x) { return x+1; }  // the end",
        "emoji 👩\u200d🚀!! ... 1,000,000",
        "<|im_start|>user is text",
        " ",
        "a  ",
        "'S 'll'd",
    ],
)
def test_text_is_cut_and_merged_by_the_rule_of_the_file(text):
    tokenizer = tokenizer_of(VOCABULARY)
    expected = [i for word in words_of(text) for i in merged(word)]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_control_tokens_keep_their_ids_and_cannot_be_spelt():
    tokenizer = tokenizer_of(VOCABULARY)
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.vocab_size == len(TOKENS)
    assert set(tokenizer.encode("<|im_end|>")).isdisjoint({0, 1, 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, "'llama' with rule 'smollm'; only 'gpt2' with 'smollm'"),
        ({"rule": "qwen2"}, "'gpt2' with rule 'qwen2'"),
        ({"types": [1] * 3}, f"{len(TOKENS)} tokens and 3 types"),
        ({"types": [6] * len(TOKENS)}, r"\[6\] are unknown; known are \[1, 3, 4\]"),
        ({"merges": ["the"]}, "merge 'the' .*not two tokens"),
        ({"merges": ["the x", "q9 z"]}, "merges"),
        ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, "are different"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(replace(VOCABULARY, **change))


def test_tokens_that_users_defined_stand_for_themselves_in_text():
    types = [*VOCABULARY.types]
    types[-1] = TokenType.USER_DEFINED
    special = tokenizer_of(replace(VOCABULARY, types=types)).special_tokens
    assert TOKENS[-1] not in special or special[TOKENS[-1]] == len(TOKENS) - 1
