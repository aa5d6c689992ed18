"""Detokenization and stop strings: laws over every division of an output into pieces."""

from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

from examples.tiny_recipe import BOS_ID, PAD_ID, build_tokenizer
from loradock.engine.serving.sequence import (
    PENDING_TOKENS_MAX,
    REPLACEMENT,
    Detokenizer,
    StopFilter,
)

TOKENIZER = build_tokenizer()

"""A token is a byte, so every character beyond ASCII is several tokens."""

TEXTS = st.text(alphabet=st.sampled_from("aé€😀\0 \ufffd"), max_size=12)


def pieces(prompt: bytes, output: bytes) -> list[str]:
    stream = Detokenizer(TOKENIZER, list(prompt))
    return [*(stream.add(byte) for byte in output), stream.flush()]


@given(prompt=TEXTS, output=TEXTS)
def test_characters_are_shown_as_soon_as_they_are_complete(prompt: str, output: str) -> None:
    shown = pieces(prompt.encode(), output.encode())
    assert "".join(shown) == output
    if REPLACEMENT not in output:
        ends = [len(output[: at + 1].encode()) - 1 for at in range(len(output))]
        expected = dict(zip(ends, output, strict=True))
        assert shown[:-1] == [expected.get(at, "") for at in range(len(output.encode()))]


@given(prompt=st.binary(max_size=8), output=st.binary(max_size=40))
@example(prompt=b"\xe2\x82", output=b"\xac and on")
@example(prompt=b"", output=b"\xff" * 40)
@example(prompt=b"", output=b"\xff\xff\xff\xff\xf0\x9f\x98\x80\xff" * 3)
@settings(max_examples=300)
def test_pieces_of_any_bytes_add_up_to_the_decoded_whole(prompt: bytes, output: bytes) -> None:
    assert "".join(pieces(prompt, output)) == output.decode(errors="replace")


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|bos|>b<|pad|>")])
def test_special_tokens_have_a_text_only_if_they_are_wanted(skip: bool, text: str) -> None:
    stream = Detokenizer(TOKENIZER, [BOS_ID, *b"x"], skip_special=skip)
    shown = [stream.add(token) for token in (*b"a", BOS_ID, *b"b", PAD_ID)]
    assert "".join([*shown, stream.flush()]) == text


class Chunks:
    """A tokenizer whose tokens are any bytes, including parts of two characters."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    def decode(self, tokens: list[int], **_: object) -> str:
        return b"".join(self._chunks[token] for token in tokens).decode(errors="replace")


ODD = st.sampled_from([b"\xff", b"\xff\xf0", b"\xf0", b"\x9f", b"\x98", b"\x80", b"\x80\xff"])


@given(chunks=st.lists(ODD, max_size=30))
@example(chunks=[b"\xff"] * 5 + [b"\xf0", b"\x9f", b"\x98", b"\x80\xff"])
@settings(max_examples=300)
def test_a_cut_never_falls_within_a_character(chunks: list[bytes]) -> None:
    stream = Detokenizer(Chunks(chunks), [])
    shown = "".join(map(stream.add, range(len(chunks)))) + stream.flush()
    assert shown == b"".join(chunks).decode(errors="replace")


def test_bytes_that_complete_no_character_are_held_back_for_a_bounded_time() -> None:
    shown = pieces(b"", b"\xff" * 100)
    pending = 0
    for piece in shown[:-1]:
        pending += 1 - len(piece)
        assert pending <= PENDING_TOKENS_MAX
    assert "".join(shown) == REPLACEMENT * 100


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 1's: words include their space, other characters are bytes."""
    words = ["<unk>", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like BERT's: words are joined by spaces, and parts of words are not."""
    words = ["[UNK]", "a", "b", "##c", "##d", "."]
    backend = Tokenizer(WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def with_special_tokens(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_tokens([AddedToken("<tool>", special=True)])
    return tokenizer


FALLBACK = fallback_tokenizer()

WITH_SPECIAL_TOKENS = [with_special_tokens(fallback_tokenizer())]

WITH_SPECIAL_TOKENS.append(with_special_tokens(word_piece_tokenizer()))

EURO = [4 + byte for byte in "€".encode()]

WORDS = st.lists(st.sampled_from([[1], [2], [3], EURO]), max_size=10).map(
    lambda parts: list(chain(*parts))
)


@pytest.mark.parametrize("tokenizer", WITH_SPECIAL_TOKENS, ids=["fallback", "word pieces"])
@given(data=st.data())
@settings(max_examples=200)
def test_special_tokens_take_no_space_from_the_words_around_them(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    special = [len(tokenizer) - 1 - at for at in range(3)]
    tokens = st.lists(st.sampled_from([1, 2, 3, *special]), max_size=10)
    prompt, output = data.draw(tokens), data.draw(tokens)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    stream = Detokenizer(tokenizer, prompt)
    shown = "".join(map(stream.add, output)) + stream.flush()
    assert decode(prompt) + shown == decode(prompt + output)


@given(prompt=WORDS, output=WORDS)
@example(prompt=EURO + EURO, output=[1])
def test_spaces_between_words_are_kept_also_after_the_prompt(
    prompt: list[int], output: list[int]
) -> None:
    stream = Detokenizer(FALLBACK, prompt)
    shown = "".join(map(stream.add, output)) + stream.flush()
    assert FALLBACK.decode(prompt) + shown == FALLBACK.decode(prompt + output)
    assert REPLACEMENT not in shown


def shown_by(stops: tuple[str, ...], chunks: list[str]) -> tuple[str, bool]:
    stop_filter = StopFilter(stops)
    text = "".join(stop_filter.add(chunk) for chunk in chunks) + stop_filter.flush()
    return text, stop_filter.has_matched


ALPHABET = st.text(alphabet="ab", max_size=10)

STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3).map(tuple)


@given(stops=STOPS, chunks=st.lists(ALPHABET, max_size=6))
@settings(max_examples=300)
def test_the_division_into_pieces_does_not_matter(
    stops: tuple[str, ...], chunks: list[str]
) -> None:
    whole = "".join(chunks)
    assert shown_by(stops, chunks) == shown_by(stops, list(whole)) == shown_by(stops, [whole])


@given(stops=STOPS, text=ALPHABET)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    stops: tuple[str, ...], text: str
) -> None:
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            longest = max(len(stop) for stop in matching)
            assert shown_by(stops, [text]) == (text[: end - longest], True)
            return
    assert shown_by(stops, [text]) == (text, False)


@pytest.mark.parametrize(
    ("stop", "chunks", "shown"),
    [
        ("END", ["a E", "N", "D b"], ["a ", "", ""]),
        ("END", ["a E", "Nx", "y"], ["a ", "ENx", "y"]),
        ("aab", ["aa", "ab"], ["", "a"]),
    ],
)
def test_only_a_possible_beginning_is_held_back(
    stop: str, chunks: list[str], shown: list[str]
) -> None:
    stop_filter = StopFilter((stop,))
    assert [stop_filter.add(chunk) for chunk in chunks] == shown
