"""Documents to batches of tokens: tokenise, pack, shuffle.

1. `prepare`: a byte-level BPE is trained on the training documents and every document encoded,
   once; the result is cached under a hash of the text and read back memory-mapped.
2. Packing: one stream of tokens, a separator before each document, cut into windows of T + 1
   tokens that overlap by one, so that each token is predicted exactly once per pass.
3. `train_batches`: windows shuffled anew in each pass, with a position that can be saved.

Byte-level BPE loses nothing, so a loss in nats per token can be told in bits per byte of text,
which does not depend on the vocabulary.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Encoding uses threads, and only here; saying so keeps tokenizers from warning at a later fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import grain
import numpy as np
from documents import HELD_OUT, LONGEST, read_documents, split_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jzero.errors import JzeroError

SEPARATOR = "<|document|>"  # token 0, before each document
CACHE_FORMAT = 1


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus: two streams of token numbers, and the tokenizer that made them.

    `train` and `held_out` are one-dimensional, memory-mapped and read-only; `held_out_bytes` is the
    length of the held-out documents in UTF-8.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int

    @property
    def held_out_tokens(self) -> int:
        """How many tokens one pass over the held-out stream predicts: all but the first."""
        return len(self.held_out) - 1

    def bits_per_byte(self, nats_per_token: float) -> float:
        """The mean loss over the held-out tokens, told per byte of held-out text."""
        return nats_per_token * self.held_out_tokens / (math.log(2) * self.held_out_bytes)

    def unigram_bits_per_byte(self) -> float:
        """What the best model that sees no context needs: the entropy of the held-out tokens."""
        counts = np.unique(self.held_out[1:], return_counts=True)[1]
        shares = counts / counts.sum()
        return self.bits_per_byte(float(-(shares * np.log(shares)).sum()))


# --- tokenising, once ----------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where tokenised corpora are kept: `$XDG_CACHE_HOME/jzero/lm`, or under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jzero" / "lm"


def prepare(
    paths: Sequence[str | Path] = (), vocabulary: int = 4096, cache: Path | None = None
) -> Corpus:
    """Read, split and tokenise a corpus, or take it from the cache.

    Arguments:
        paths: as `read_documents` takes them.
        vocabulary: the most tokens that the tokenizer may have, the 256 bytes and the separator
            included; a small corpus gives fewer.
        cache: folder to keep results in; `cache_folder()` by default.

    Raises:
        JzeroError: for unreadable or too little text, or a cache that cannot be written.
    """
    if vocabulary < 257:
        raise JzeroError(f"vocabulary {vocabulary} does not hold the 256 bytes and a separator")
    documents = read_documents(paths)
    key = hashlib.sha256(f"{CACHE_FORMAT} {vocabulary} {HELD_OUT} {LONGEST}".encode())
    for text in documents:
        encoded = text.encode()
        key.update(len(encoded).to_bytes(8, "little"))
        key.update(encoded)
    folder = (cache or cache_folder()) / key.hexdigest()[:24]
    if not folder.exists():
        try:
            write_corpus(folder, documents, vocabulary)
        except OSError as error:
            raise JzeroError(
                f"{folder.parent}: the cache cannot be written ({error.strerror}): "
                "set XDG_CACHE_HOME to another folder"
            ) from error
    return read_corpus(folder)


def write_corpus(folder: Path, documents: Sequence[str], vocabulary: int) -> None:
    """Tokenise into `folder`, which appears complete or not at all."""
    train, held_out = split_documents(documents)
    tokenizer = train_tokenizer(train, vocabulary)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        tokenizer.save(str(unfinished / "tokenizer.json"))
        np.save(unfinished / "train.npy", encode(tokenizer, train))
        np.save(unfinished / "held_out.npy", encode(tokenizer, held_out))
        held_out_bytes = sum(len(text.encode()) for text in held_out)
        (unfinished / "corpus.json").write_text(json.dumps({"held_out_bytes": held_out_bytes}))
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_corpus(folder: Path) -> Corpus:
    """A corpus that `write_corpus` has written."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # Text that spells out the separator is text.
        tokenizer.encode_special_tokens = True
        return Corpus(
            tokenizer,
            train=np.load(folder / "train.npy", mmap_mode="r"),
            held_out=np.load(folder / "held_out.npy", mmap_mode="r"),
            held_out_bytes=json.loads((folder / "corpus.json").read_text())["held_out_bytes"],
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise JzeroError(f"{folder}: the cached corpus is damaged: delete this folder") from error


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens; the same documents give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """One stream: before each document a separator (0), then its tokens."""
    small = tokenizer.get_vocab_size() <= 1 << 16
    parts = []
    for start in range(0, len(documents), 256):  # by parts: encodings are far larger than tokens
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 256]):
            parts.append(np.array([0, *encoding.ids], np.uint16 if small else np.uint32))
    return np.concatenate(parts)


# --- batches -------------------------------------------------------------------------------------


class Windows:
    """A stream of tokens as windows [T + 1]; the last token of each is the first of the next."""

    def __init__(self, tokens: np.ndarray, context: int):
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(index) * self.context
        return {"tokens": self.tokens[start : start + self.context + 1].astype(np.int32)}


def train_batches(
    corpus: Corpus,
    context: int,
    rows: int,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator:
    """An endless iterator of `{"tokens": int32 [rows / process_count, context + 1]}`.

    Batch i holds the same windows whatever the number of processes, each of which gets its share
    of the rows. `get_state()` is a small dict that JSON can hold; `set_state()` goes on from it.

    Arguments:
        corpus: from `prepare`.
        context: T, the tokens that a row predicts.
        rows: rows of the global batch.
        seed: of the shuffle, which differs in every pass over the corpus.
        process_index, process_count: `jax.process_index()`, `jax.process_count()`.

    Raises:
        JzeroError: where the corpus does not fill one batch, or processes do not divide the rows.
    """
    share = rows_per_process(rows, process_count)
    windows = Windows(corpus.train, context)
    if len(windows) < rows:
        raise JzeroError(
            f"the corpus fills {len(windows)} windows of {context} tokens, a batch needs {rows}: "
            "give --data more text, or make the batch smaller"
        )
    # Endless in effect; repeat() without a number makes a length that a batch of one row overflows.
    dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat(1 << 24)
    dataset = dataset[process_index::process_count].batch(share)
    # One thread reads ahead; processes would cost more than they bring for a memory-mapped array.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def held_out_batches(
    corpus: Corpus,
    context: int,
    rows: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """One pass over the held-out stream, every token predicted once.

    Yields `tokens` int32 [rows / process_count, context + 1] and `weights` float32
    [rows / process_count, context], 0 over the padding at the end; as many batches in every
    process. Global batch i predicts min(rows * context, held_out_tokens - i * rows * context).
    """
    share = rows_per_process(rows, process_count)
    predicted = corpus.held_out_tokens
    for first in range(0, predicted, rows * context):
        begin = first + process_index * share * context
        stream = corpus.held_out[begin : begin + share * context + 1].astype(np.int32)
        stream = np.pad(stream, (0, share * context + 1 - len(stream)))
        starts = context * np.arange(share)[:, None]
        real = begin + starts + np.arange(context) < predicted
        yield {
            "tokens": stream[starts + np.arange(context + 1)],
            "weights": real.astype(np.float32),
        }


def rows_per_process(rows: int, process_count: int) -> int:
    if rows % process_count:
        raise JzeroError(f"a batch of {rows} rows does not divide among {process_count} processes")
    return rows // process_count
