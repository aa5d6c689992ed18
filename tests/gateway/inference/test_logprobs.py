"""Log-probabilities of tokens that are parts of characters."""

from pathlib import Path

from loradock.gateway.inference.logprobs import (
    CharacterCount,
    TokenText,
    chat_logprobs,
    completion_logprobs,
)
from loradock.gateway.inference.tokenizer import Tokenizer
from loradock.messages.views import TokenLogprob
from tests.support.gateway.served import model_directory

TEXT = "aé😀b"


def test_tokens_within_a_character_have_its_place_and_their_own_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_directory(tmp_path))
    tokens = tokenizer.encode(TEXT, special=False)
    entries = [TokenLogprob(token, -1.5, 1, ((token, -1.5),)) for token in tokens]

    def text_of(token: int) -> TokenText:
        return TokenText(tokenizer.token_text(token), tokenizer.token_bytes(token))

    count = CharacterCount()
    parts = [
        completion_logprobs(tokens[part], entries[part], text_of, count)
        for part in (slice(0, 2), slice(2, 5), slice(5, None))
    ]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3]
    assert parts[0].tokens == ["a", "\ufffd"]
    content = chat_logprobs(entries, text_of).content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == TEXT
    assert [entry.top_logprobs[0].bytes for entry in content] == [one.bytes for one in content]
