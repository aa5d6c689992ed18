"""The model's tokenizer and its files, without the libraries of the engine.

Only `tokenizer.json` is read: importing the libraries that convert other formats takes a hundred
times the memory of a gateway.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Vocabulary

from loradock.gateway.http.errors import HttpError
from loradock.messages.errors import ErrorCode

FILE_BYTES_MAX: Final = 256 << 20
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")

PIECE_CHARACTERS: Final = 16_384
"""The characters of a long text that are tokenized before the tokens are compared with a bound."""

_SEAM_TOKENS: Final = 128
"""Bound on the tokens that one cut through a word or a run of spaces adds to a text."""

_NO_CHARACTER: Final = "\ufffd"
"""The character that stands for bytes which are no character."""

_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
"""A vocabulary's entry for a byte, where texts are not divided into bytes before."""


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary (GPT-2's) stands for.

    A byte that Latin-1 prints stands for itself; the others are numbered from 256 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    characters = [*map(chr, printed), *(chr(0x100 + index) for index in range(len(others)))]
    return dict(zip(characters, [*printed, *others], strict=True))


_BYTE_OF_CHARACTER: Final = _byte_of_character()


class Tokenizer:
    """The tokenizer in a model's directory; raises `OSError` and `ValueError` for other files."""

    def __init__(self, directory: Path) -> None:
        self._vocabulary = _vocabulary(directory / "tokenizer.json")
        text = read_text(directory / TOKENIZER_CONFIG_FILE) or "{}"
        self.config = json_object(text, TOKENIZER_CONFIG_FILE)
        self.special_tokens: Final = special_tokens(self.config)
        self._anchor: Final = self.encode("a", special=False)[:1]
        self._anchor_length: Final = len(self.decode(self._anchor))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids; `special`: with the ids that the tokenizer adds to every text.

        It lets other threads run.
        """
        # Unlike `encode`, it releases the interpreter's lock, and counts no offsets.
        [found] = self._vocabulary.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def exceeds(self, text: str, tokens_max: int) -> bool:
        """Return whether a text certainly has more tokens, without tokenizing all of it.

        It is tokenized in pieces until they have too many tokens. A text of one piece is not.
        """
        found = 0
        if len(text) <= PIECE_CHARACTERS:
            return False
        for first in range(0, len(text), PIECE_CHARACTERS):
            piece = text[first : first + PIECE_CHARACTERS]
            found += max(0, len(self.encode(piece, special=False)) - _SEAM_TOKENS)
            if found > tokens_max:
                return True
        return False

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special ones included; it lets other threads run."""
        texts = self._vocabulary.decode_batch([list(tokens)], skip_special_tokens=False)
        return str(texts[0])

    def token_text(self, token: int) -> str:
        """Return the text of one token id, with a space that it begins with."""
        # Some tokenizers drop the space before the first word of a text.
        tokens = [*self._anchor, token]
        text: str = self._vocabulary.decode(tokens, skip_special_tokens=False)
        return text[self._anchor_length :]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token id in UTF-8, which can be a part of a character."""
        text = self.token_text(token)
        if _NO_CHARACTER not in text:
            return text.encode()
        entry = self._vocabulary.id_to_token(token) or ""
        if _BYTE.fullmatch(entry):
            return bytes.fromhex(entry[3:5])
        data = [_BYTE_OF_CHARACTER.get(character, -1) for character in entry]
        return text.encode() if -1 in data else bytes(data)

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts of special tokens, which are left out of outputs."""
        added = self._vocabulary.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the vocabulary's entry of each token id."""
        return [self._vocabulary.id_to_token(token) or "" for token in tokens]

    def token_id(self, text: str) -> int | None:
        """Return the id of a token; None if no token has this text."""
        found: int | None = self._vocabulary.token_to_id(text)
        return found

    @property
    def adds_bos(self) -> bool:
        """Return whether the tokenizer adds the beginning-of-text token to every text."""
        bos = self.special_tokens.get("bos_token")
        first = self.encode("a", special=True)[:1]
        return bos is not None and first == [self._vocabulary.token_to_id(bos)]


def _vocabulary(path: Path) -> Vocabulary:
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ValueError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    text = path.read_text()
    # Its own threads would be one more for each processor, outside the shares of clients.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return Vocabulary.from_str(text)
    except Exception as error:
        # The library raises plain exceptions.
        raise ValueError(f"{path}: {error}") from error


def read_text(path: Path) -> str | None:
    """Return the text of a file; None if there is none. Raises `OSError` and `ValueError`."""
    return path.read_text() if path.is_file() else None


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer's configuration names."""
    tokens = {name: _token_text(tokenizer_config.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in tokens.items() if text}


def _token_text(entry: object) -> str:
    """Return the text of a special token, which is saved as a string or as an object."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def json_object(text: str, name: str) -> dict[str, Any]:
    """Return the object in a JSON file; raises `ValueError`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be an object, got a {type(found).__name__}")
    return found


def no_tokenizer() -> HttpError:
    """Return the error for a request that needs a tokenizer, which is missing."""
    code = ErrorCode.NOT_SERVED.value
    return HttpError(
        400,
        f"{code}: the gateway has no tokenizer.json of this model, so chats, texts of tokens and "
        "/tokenize are not served; send token ids to /v1/completions",
        error_code=code,
    )
