from longarc.data.corpora import read_corpus
from longarc.tokens.tokenizer import Tokenizer
from longarc.tokens.words import WORDS


def test_a_small_tokenizer_of_python_source_holds_nearly_all_words_whole():
    tokenizer = Tokenizer.train(read_corpus(max_bytes=1_500_000).texts, vocab_size=2048)
    whole = [word for word in WORDS if len(tokenizer.encode(word)) == 1]
    assert len(whole) >= 0.95 * len(WORDS)


def test_no_word_begins_another_so_that_searching_for_one_finds_one():
    assert len(set(WORDS)) == len(WORDS)
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and b.startswith(a)]
