"""The tokenizer that was saved beside an adapter, compared with the base model's.

Prompts and outputs are always in the base model's tokens. An adapter that was trained with others
is served all the same, so what differs is a warning.
"""

from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Final

import msgspec
import xxhash
from msgspec import Struct

from loradock.engine.adapters.directory import AdapterFiles, OpenFile
from loradock.engine.adapters.problems import listed, shown
from loradock.engine.errors import EngineError

TOKENIZER_FILE: Final = "tokenizer.json"
OLD_FILES: Final = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Vocabularies of tokenizers that were saved without `TOKENIZER_FILE`."""
ADDED_TOKENS_FILE: Final = "added_tokens.json"
"""The tokens that were added to them."""
TOKENIZER_FILES: Final = (TOKENIZER_FILE, ADDED_TOKENS_FILE, *OLD_FILES)
"""The files of a tokenizer that may be opened."""

BYTES_MAX: Final = 64 << 20
VALUES_MAX: Final = 4_000_000
"""Bounds of what is compared; the largest known vocabularies have 35 MB and 1.5 million values."""

_CONTENTS_MAX: Final = 64

Vocabulary = Mapping[str, int]
"""The id of each token, added tokens included."""


class _AddedToken(Struct):
    content: str
    id: int


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(Struct):
    """The part of a tokenizer.json that has tokens; a Unigram's ids are their places in a list."""

    added_tokens: list[_AddedToken] = []
    model: _Model = msgspec.field(default_factory=_Model)


class _Tokens(Struct):
    """The tokens of an adapter's tokenizer: those that it was made with, and those added later."""

    vocabulary: Vocabulary
    added: Vocabulary


class BaseTokenizer:
    """The base model's tokens, with which adapters' tokens are compared.

    `read_vocabulary` returns them, None if they are not known; it is called once. `rows`: the rows
    of the token embedding, 0 if unknown. Threads may use it at the same time.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary | None], rows: int) -> None:
        self._read_vocabulary = read_vocabulary
        self._rows = rows
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None
        self._is_read = False
        # By content, because adapters of one trainer have the same.
        self._found: dict[bytes, tuple[str, ...]] = {}

    def warnings_about(self, files: AdapterFiles) -> tuple[str, ...]:
        """Return how the tokenizer in an adapter's directory differs; nothing without one."""
        with self._lock:
            try:
                return self._compared(files)
            except EngineError as error:
                return (f"the tokenizer beside the adapter is not compared: {error.message}",)

    def _compared(self, files: AdapterFiles) -> tuple[str, ...]:
        if (current := files.other(TOKENIZER_FILE)) is not None:
            return self._about(current)
        added = files.other(ADDED_TOKENS_FILE)
        found = () if added is None else self._about(added)
        return (*found, *_about_old(files))

    def _about(self, file: OpenFile) -> tuple[str, ...]:
        name, size_bytes = file.name, file.size_bytes
        if size_bytes > BYTES_MAX:
            return (f"{name} has {size_bytes} bytes; at most {BYTES_MAX} are compared",)
        raw = file.read(0, size_bytes)
        key = xxhash.xxh3_128_digest(raw) + name.encode()
        if key not in self._found:
            if len(self._found) >= _CONTENTS_MAX:
                self._found.clear()
            self._found[key] = tuple(self._differences(name, raw))
        return self._found[key]

    def _differences(self, name: str, raw: bytes) -> Iterator[str]:
        if raw.count(b",") > VALUES_MAX:
            yield f"{name} has more than {VALUES_MAX} values and is not compared"
            return
        try:
            tokens = _tokens_in(name, raw)
        except (msgspec.DecodeError, RecursionError) as error:
            yield f"{name} is not compared, because it can't be read: {shown(str(error))}"
            return
        base = self._base()
        if base is not None:
            yield from _compare(tokens, base)
        elif self._rows:
            yield from self._compare_with_rows(tokens)

    def _base(self) -> Vocabulary | None:
        if not self._is_read:
            self._vocabulary, self._is_read = self._read_vocabulary(), True
        return self._vocabulary

    def _compare_with_rows(self, tokens: _Tokens) -> Iterator[str]:
        every = {**tokens.vocabulary, **tokens.added}
        beyond = [token for token, number in every.items() if not 0 <= number < self._rows]
        if beyond:
            yield (
                f"the adapter's tokenizer has {len(beyond)} tokens beyond the model's "
                f"{self._rows} embeddings: {listed([*map(shown, beyond)])}"
            )


def _tokens_in(name: str, raw: bytes) -> _Tokens:
    if name == ADDED_TOKENS_FILE:
        return _Tokens({}, msgspec.json.decode(raw, type=dict[str, int]))
    file = msgspec.json.decode(raw, type=_TokenizerFile)
    vocab = file.model.vocab
    if isinstance(vocab, list):
        vocab = {entry[0]: index for index, entry in enumerate(vocab)}
    return _Tokens(vocab, {token.content: token.id for token in file.added_tokens})


def _compare(tokens: _Tokens, base: Vocabulary) -> Iterator[str]:
    added = [token for token in tokens.added if token not in base]
    if added:
        yield (
            f"the model's tokenizer lacks {len(added)} tokens that were added to the adapter's, so "
            "no prompt or output has them; serve a base model that was saved with that tokenizer: "
            f"{listed([*map(shown, added)])}"
        )
    missing = [token for token in tokens.vocabulary if token not in base]
    if missing:
        yield (
            f"the model's vocabulary lacks {len(missing)} tokens of the adapter's tokenizer, "
            f"which was trained with another base model: {listed([*map(shown, missing)])}"
        )
    every = {**tokens.vocabulary, **tokens.added}
    moved = [token for token, number in every.items() if base.get(token, number) != number]
    if moved:
        examples = [f"{shown(token)} ({every[token]}, not {base[token]})" for token in moved]
        yield (
            f"{len(moved)} tokens have other ids in the adapter's tokenizer than in the model's: "
            f"{listed(examples)}"
        )


def _about_old(files: AdapterFiles) -> Iterator[str]:
    found = next((name for name in OLD_FILES if files.other(name) is not None), None)
    if found is not None:
        yield (
            f"{found} is not compared with the model's tokenizer; save the adapter's with a "
            f"current transformers, which writes {TOKENIZER_FILE}"
        )
