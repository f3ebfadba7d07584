from pathlib import Path

import pytest

from longarc.data.corpora import passages, read_corpus
from longarc.errors import ConfigError


@pytest.fixture
def library(tmp_path):
    for number in range(200):
        (tmp_path / f"m{number}.py").write_text(f"x = {number}\n" * 5)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "hidden.py").write_text("secret = 1\n")
    (tmp_path / "old.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'while': 'The loop\\nruns.'}\n")
    return tmp_path


def test_reading_twice_gives_the_same_bytes_and_another_seed_another_order(library):
    first = read_corpus(max_bytes=10**6, root=library)
    assert read_corpus(max_bytes=10**6, root=library) == first
    other = read_corpus(max_bytes=10**6, root=library, seed=1)
    assert other.names != first.names
    assert set(other.names) == set(first.names)
    assert other.digest != first.digest


def test_the_digest_sees_a_single_changed_byte(library):
    before = read_corpus(max_bytes=10**6, root=library)
    changed = next(name for name in before.names if name.startswith("m"))
    path = library / changed
    path.write_text(path.read_text().replace("x", "y", 1))
    assert read_corpus(max_bytes=10**6, root=library).digest != before.digest


def test_held_out_files_are_in_no_training_corpus_whatever_the_seed(library):
    held_out = set(read_corpus(max_bytes=10**6, root=library, split="held_out").names)
    assert 2 <= len(held_out) <= 25
    for seed in range(3):
        assert not held_out & set(read_corpus(max_bytes=10**6, root=library, seed=seed).names)


def test_tests_tables_empty_files_and_other_encodings_are_left_out_and_topics_are_read_as_text(
    library,
):
    both = [
        read_corpus(max_bytes=10**6, root=library),
        read_corpus(max_bytes=10**6, root=library, split="held_out"),
    ]
    names = {name for corpus in both for name in corpus.names}
    assert not names & {"test/hidden.py", "old.py", "empty.py", "pydoc_data/topics.py"}
    texts = dict(zip(both[0].names + both[1].names, both[0].texts + both[1].texts, strict=True))
    assert texts["topics/while"] == "The loop\nruns."


def test_the_bound_is_kept_and_one_that_holds_nothing_is_refused(library):
    corpus = read_corpus(max_bytes=500, root=library)
    assert 400 < corpus.num_bytes <= 500
    assert corpus.num_bytes == sum(len(t.encode()) for t in corpus.texts)
    with pytest.raises(ConfigError, match="max_bytes = 10 holds no file"):
        read_corpus(max_bytes=10, root=library)


def test_passages_end_at_line_ends_and_join_to_the_texts(library):
    corpus = read_corpus(max_bytes=10**6, root=library)
    cut = passages(corpus, passage_bytes=16)
    assert "".join(cut) == "".join(corpus.texts)
    assert all(p.endswith(("\n", "runs.")) for p in cut)
    assert max(len(p) for p in cut) <= 16 + 9


def test_the_interpreters_own_library_is_real_text():
    corpus = read_corpus(max_bytes=300_000)
    assert corpus.num_bytes > 100_000
    assert not any(Path(name).is_absolute() for name in corpus.names)
    assert "import " in "".join(corpus.texts)
