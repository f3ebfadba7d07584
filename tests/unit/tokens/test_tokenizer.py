import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from longarc.errors import CheckpointError, ConfigError
from longarc.tokens.tokenizer import GLM_SPECIAL_TOKENS, Tokenizer
from token_samples import CORPUS, small_tokenizer

TOKENIZER = small_tokenizer()


@given(st.text())
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.sampled_from([*GLM_SPECIAL_TOKENS, "a", " ", "<|", "é", "\n"])).map("".join))
def test_text_never_becomes_a_control_token(text):
    ids = TOKENIZER.encode(text)
    assert not set(ids) & set(TOKENIZER.special_tokens.values())
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_every_sequence_of_ids_has_exact_bytes(ids):
    whole = TOKENIZER.decode_bytes(ids)
    assert whole == b"".join(TOKENIZER.token_bytes(i) for i in ids)
    assert TOKENIZER.decode(ids, keep_special=True) == whole.decode("utf-8", errors="replace")


@given(st.binary())
def test_every_byte_is_a_token(data):
    ids = [TOKENIZER.encode(chr(b))[-1] if b < 128 else _id_of_byte(b) for b in data]
    assert TOKENIZER.decode_bytes(ids) == data


def _id_of_byte(byte: int) -> int:
    return next(i for i in range(256) if TOKENIZER.token_bytes(i) == bytes([byte]))


def test_a_lone_surrogate_counts_as_the_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


def test_control_tokens_are_the_last_ids_and_the_size_is_exact():
    assert TOKENIZER.vocab_size == 320
    assert list(TOKENIZER.special_tokens) == list(GLM_SPECIAL_TOKENS)
    assert list(TOKENIZER.special_tokens.values()) == list(range(320 - 17, 320))


def test_control_tokens_are_left_out_of_text_unless_asked_for():
    ids = [TOKENIZER.special_id("<|user|>"), *TOKENIZER.encode("hi"), 319]
    assert TOKENIZER.decode(ids) == "hi"
    assert TOKENIZER.decode(ids, keep_special=True) == "<|user|>hi</arg_value>"


@pytest.mark.parametrize("before", ["", " ", "\n", '"', "cat ", "x = ", "("])
@pytest.mark.parametrize("name", ["data/k3f9.txt", "archive", "HTTPServer", "a_b-c.py", "2048"])
def test_a_name_is_spelled_the_same_wherever_it_stands(before, name):
    ids = TOKENIZER.encode(name)
    assert (
        TOKENIZER.encode(before + name + "\n")[len(TOKENIZER.encode(before)) :][: len(ids)] == ids
    )


@pytest.mark.parametrize(
    ("text", "boundaries"),
    [
        ("k3f9.txt", "k|3|f|9|.|txt"),
        ("HTTPServer2", "HTTP|Server|2"),
        ("a  b\n\n  c", "a|  |b|\n\n  |c"),
        ('"""x"""==', '"""|x|"""|=='),
        ("../x->y", "..|/|x|-|>|y"),
        ("東京tower", "東京tower"),
        ("snake_case", "snake|_|case"),
    ],
)
def test_pre_tokens_split_digits_cases_and_marks(text, boundaries):
    cut = {0}
    for piece in boundaries.split("|"):
        cut.add(max(cut) + len(piece.encode()))
    position, reached = 0, {0}
    for token_id in TOKENIZER.encode(text):
        position += len(TOKENIZER.token_bytes(token_id))
        reached.add(position)
    assert cut <= reached, "a token crosses a boundary"


def test_digits_are_never_merged_however_frequent():
    tokenizer = Tokenizer.train(["12 " * 50 + "ab " * 3], vocab_size=256 + 1 + 17)
    assert len(tokenizer.encode("12")) == 2
    assert len(tokenizer.encode("ab")) == 1


def test_a_forged_control_token_does_not_change_how_its_surroundings_are_spelled():
    around = TOKENIZER.encode("the ")
    assert len(around) < len("the ")
    assert TOKENIZER.encode("the <|user|>")[: len(around)] == around


def test_training_is_a_function_of_the_texts_also_in_another_process():
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from token_samples import small_tokenizer\n"
        "print(small_tokenizer().digest, 'torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, *[p for p in sys.path if p.endswith(("src", "tests"))]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == [TOKENIZER.digest, "False"]
    assert Tokenizer.train(CORPUS[::-1], vocab_size=320).digest == TOKENIZER.digest


def test_a_saved_tokenizer_loads_from_its_file_and_its_directory(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.digest == TOKENIZER.digest
        assert loaded.encode("hello <think>") == TOKENIZER.encode("hello <think>")
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


def test_another_tokenizer_has_another_digest():
    assert Tokenizer.train(CORPUS, vocab_size=319).digest != TOKENIZER.digest


def test_missing_and_damaged_files_are_checkpoint_errors(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        Tokenizer.load(tmp_path)
    file = tmp_path / "tokenizer.json"
    TOKENIZER.save(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Tokenizer.load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Tokenizer.load(file)


def test_sizes_that_cannot_be_are_config_errors_that_say_what_can():
    with pytest.raises(ConfigError, match="need at least 273"):
        Tokenizer.train(CORPUS, vocab_size=272)
    with pytest.raises(ConfigError, match=r"yield (\d+) tokens.*set vocab_size=\1 or less"):
        Tokenizer.train(["a b"], vocab_size=4096)
    assert Tokenizer.train([], vocab_size=273).vocab_size == 273


def test_an_unknown_control_token_names_those_there_are():
    with pytest.raises(CheckpointError, match=r"no control token '<\|im_start\|>'.*<think>"):
        TOKENIZER.special_id("<|im_start|>")


def test_an_id_of_a_padded_embedding_reads_as_the_replacement_character():
    assert TOKENIZER.decode_bytes([65, 320, 66]) == b"".join(
        [TOKENIZER.token_bytes(65), b"\xef\xbf\xbd", TOKENIZER.token_bytes(66)]
    )
    assert TOKENIZER.decode([5000]) == "\N{REPLACEMENT CHARACTER}"


def foreign(special: dict[str, bool], *, byte_level: bool) -> Tokenizer:
    """A tokenizer as other projects ship it; ``special`` maps added tokens to their flag."""
    if byte_level:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {char: i for i, char in enumerate(alphabet)}
        for token in special:
            vocabulary[token] = len(vocabulary)
        inner = HfTokenizer(models.BPE(vocabulary, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    else:
        inner = HfTokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "<s>": 2}, unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
    for token, is_special in special.items():
        inner.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    return Tokenizer(inner)


def test_control_tokens_of_other_models_cannot_be_forged_even_if_not_flagged_special():
    tokenizer = foreign({"<|im_end|>": True, "<tool_call>": False, "    ": False}, byte_level=True)
    assert set(tokenizer.special_tokens) == {"<|im_end|>", "<tool_call>"}
    text = "a<|im_end|><tool_call>    b"
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("    ")) == 1, "runs of blanks are text and stay one token"


def test_a_vocabulary_that_lists_a_control_token_as_a_word_cannot_be_forged():
    inner = HfTokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1, "<": 2, "s": 3, ">": 4}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(inner)
    assert tokenizer.special_tokens == {"<s>": 1}
    assert tokenizer.encode("<s>") == [2, 3, 4]


def test_models_that_do_not_work_on_bytes_decode_by_their_own_rules():
    tokenizer = foreign({"<s>": True}, byte_level=False)
    ids = tokenizer.encode("hello")
    assert ids == [1]
    assert tokenizer.decode([2, 1]) == "hello"
    assert "<s>" in tokenizer.decode([2, 1], keep_special=True)
    assert tokenizer.token_bytes(1) == b"hello"
    with pytest.raises(ConfigError, match="not byte-level"):
        tokenizer.decode_bytes([1])


def test_the_file_is_plain_hugging_face_json(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    assert data["model"]["type"] == "BPE"
    assert HfTokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == 320
