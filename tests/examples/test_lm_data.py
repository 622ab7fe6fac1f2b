"""The example's data: what is read, what is held out, and that no token is lost or seen twice."""

import json
import math
from collections import Counter

import data
import documents
import numpy as np
import pytest

from jzero.errors import JzeroError

WORDS = "stage shard mesh axis gather reduce scatter weight moment loss step batch".split()


def write_text(seed, lines=60):
    rng = np.random.default_rng(seed)
    return "".join(" ".join(rng.choice(WORDS, 9)) + f" {seed}é\n" for _ in range(lines))


@pytest.fixture(scope="module")
def texts():
    return [write_text(seed) for seed in range(80)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("text")
    for index, text in enumerate(texts):
        (folder / f"{index:03}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, folder):
    return data.prepare([folder], vocabulary=300, cache=tmp_path_factory.mktemp("cache"))


# --- reading


def test_files_folders_globs_and_jsonl_give_the_same_documents(tmp_path, folder, texts):
    assert documents.read_documents([folder]) == texts
    assert documents.read_documents([f"{folder}/*.txt"]) == texts
    assert documents.read_documents(sorted(folder.iterdir())) == texts
    lines = tmp_path / "all.jsonl"
    lines.write_text("\n".join(json.dumps({"id": 1, "text": text}) for text in texts) + "\n\n")
    assert documents.read_documents([lines]) == texts
    assert documents.read_documents([lines, folder]) == texts  # repetitions are dropped


def test_a_folder_is_searched_for_text_alone(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.md").write_text("b")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\xff")
    assert documents.read_documents([tmp_path]) == ["a", "b"]


def test_the_default_corpus_is_the_standard_library():
    found = documents.read_documents()
    assert sum(map(len, found)) > 4e6
    assert any("class OrderedDict" in text for text in found)
    assert found == documents.read_documents()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("no.txt", None, "no.txt: no such file or folder"),
        ("no*.txt", None, r"no\*.txt: the pattern matches no file"),
        ("a.txt", b"", "a.txt: the file is empty"),
        ("a.txt", b" \n\n", "a.txt: the file is empty"),
        ("a.txt", b"abc\xff", r"a.txt: not UTF-8 at byte 3: convert it first"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', "a.jsonl:2: not JSON: .* at column 8"),
        ("a.jsonl", b'{"body": "a", "id": 3}', r'a.jsonl:1: no "text" .*\(found: body, id\)'),
        ("a.jsonl", b'{"text": 3}', r'a.jsonl:1: no "text" field that is a string'),
        ("a.jsonl", b"[1]", r'a.jsonl:1: no "text" .*\(found: list\)'),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1: the text holds half a surrogate pair"),
        ("a.txt", b"too little", "too small for a held-out part: give --data more text"),
    ],
)
def test_bad_text_is_refused_in_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JzeroError, match=message) as caught:
        data.prepare([tmp_path / name], vocabulary=300, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(JzeroError, match="the folder holds no .txt, .md, .rst, .py, .jsonl file"):
        documents.read_documents([tmp_path])


# --- splitting


def test_held_out_documents_are_never_trained_on(texts):
    train, held_out = documents.split_documents(texts)
    assert set(train).isdisjoint(held_out)
    assert sorted(train + held_out) == sorted(texts)
    share = sum(map(len, held_out)) / sum(map(len, texts))
    assert documents.HELD_OUT <= share < 2 * documents.HELD_OUT
    assert documents.split_documents(texts) == (train, held_out)


def test_one_long_document_is_cut_at_line_breaks(texts):
    whole = "".join(texts)
    train, held_out = documents.split_documents([whole])
    assert len(train) > 40 and set(train).isdisjoint(held_out)
    assert sum(map(len, train + held_out)) == len(whole)
    assert all(piece.endswith("\n") for piece in train + held_out)
    assert list(documents.cut("x" * 25, 10)) == ["x" * 10, "x" * 10, "x" * 5]


# --- tokenising


def test_tokens_are_the_text_again(corpus, texts):
    train, held_out = documents.split_documents(texts)
    for stream, texts in ((corpus.train, train), (corpus.held_out, held_out)):
        starts = np.flatnonzero(stream == 0)
        assert len(starts) == len(texts)
        parts = np.split(stream, starts)[1:]
        assert [corpus.tokenizer.decode(part[1:].tolist()) for part in parts] == texts
    assert corpus.held_out_bytes == sum(len(text.encode()) for text in held_out)
    assert corpus.train.max() < corpus.tokenizer.get_vocab_size() <= 300


def test_text_that_spells_the_separator_is_text(corpus):
    text = f"a {data.SEPARATOR} b"
    tokens = corpus.tokenizer.encode(text).ids
    assert 0 not in tokens
    assert corpus.tokenizer.decode(tokens) == text


def test_the_cache_is_used_and_complete_or_absent(tmp_path, folder, corpus, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(data, "encode", lambda *_: 1 / 0)  # fails after the tokenizer is written
        with pytest.raises(ZeroDivisionError):
            data.prepare([folder], vocabulary=300, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    data.prepare([folder], vocabulary=300, cache=tmp_path)
    monkeypatch.setattr(data, "write_corpus", lambda *_: 1 / 0)
    again = data.prepare([folder], vocabulary=300, cache=tmp_path)
    np.testing.assert_array_equal(again.train, corpus.train)
    assert not again.train.flags.writeable
    (only,) = tmp_path.iterdir()
    (only / "train.npy").write_bytes(b"")
    with pytest.raises(JzeroError, match="cached corpus is damaged: delete this folder"):
        data.prepare([folder], vocabulary=300, cache=tmp_path)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_folder() == tmp_path / "jzero" / "lm"


def test_a_cache_that_cannot_be_written_is_named(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(JzeroError, match="cache cannot be written .*: set XDG_CACHE_HOME"):
        data.prepare([folder], vocabulary=300, cache=tmp_path / "file")


def test_a_vocabulary_without_room_for_bytes_is_refused(folder):
    with pytest.raises(JzeroError, match="vocabulary 100 does not hold the 256 bytes"):
        data.prepare([folder], vocabulary=100)


# --- bits per byte


def test_bits_per_byte(corpus):
    targets = corpus.held_out[1:].tolist()
    counts = Counter(targets)
    bits = -sum(n * math.log2(n / len(targets)) for n in counts.values())
    assert corpus.unigram_bits_per_byte() == pytest.approx(bits / corpus.held_out_bytes)
    # Guessing evenly among 256 bytes, one token a byte, would need 8 bits a byte.
    tokens_per_byte = len(targets) / corpus.held_out_bytes
    assert corpus.bits_per_byte(math.log(256)) == pytest.approx(8 * tokens_per_byte)


# --- batches


def take(iterator, count):
    return [next(iterator)["tokens"] for _ in range(count)]


def test_one_pass_predicts_every_token_once(corpus):
    windows = (len(corpus.train) - 1) // 32
    batches = data.train_batches(corpus, context=32, rows=1, seed=3)
    rows = np.concatenate(take(batches, windows))
    assert rows.shape == (windows, 33) and rows.dtype == np.int32
    expected = np.stack([corpus.train[i * 32 : i * 32 + 33] for i in range(windows)])
    assert not np.array_equal(rows, expected)
    np.testing.assert_array_equal(np.unique(rows, axis=0), np.unique(expected, axis=0))
    assert sorted(map(bytes, rows)) == sorted(map(bytes, expected.astype(np.int32)))
    second = np.concatenate(take(batches, windows))
    assert sorted(map(bytes, second)) == sorted(map(bytes, rows))
    assert not np.array_equal(second, rows)


def test_the_seed_decides_the_order(corpus):
    first, again, other = (
        np.stack(take(data.train_batches(corpus, 32, 4, seed=seed), 5)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_saved_position_gives_the_same_batches(corpus):
    batches = data.train_batches(corpus, 32, 4)
    take(batches, 7)
    position = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 400)  # into the next pass
    restored = data.train_batches(corpus, 32, 4)
    restored.set_state(position)
    np.testing.assert_array_equal(take(restored, 400), expected)


def test_processes_share_the_rows_of_the_same_batches(corpus):
    whole = take(data.train_batches(corpus, 32, 6), 100)
    shares = [take(data.train_batches(corpus, 32, 6, 0, index, 3), 100) for index in range(3)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert all(part.shape == (2, 33) for part in parts)
        assert sorted(map(bytes, batch)) == sorted(map(bytes, np.concatenate(parts)))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_held_out_batches_predict_every_token_once(corpus, processes):
    per_process = [
        list(data.held_out_batches(corpus, 32, 4, index, processes)) for index in range(processes)
    ]
    assert len({len(batches) for batches in per_process}) == 1
    seen = []
    for parts in zip(*per_process, strict=True):
        for part in parts:
            assert part["tokens"].shape == (4 // processes, 33)
            assert part["weights"].shape == (4 // processes, 32)
            seen.append(part["tokens"][:, 1:][part["weights"] == 1])
    np.testing.assert_array_equal(np.concatenate(seen), corpus.held_out[1:])


def test_too_small_or_uneven_batches_are_refused(corpus):
    with pytest.raises(JzeroError, match=r"fills \d+ windows of 32 tokens, a batch needs 99999"):
        data.train_batches(corpus, 32, 99_999)
    with pytest.raises(JzeroError, match="a batch of 4 rows does not divide among 3 processes"):
        data.train_batches(corpus, 32, 4, process_count=3)
