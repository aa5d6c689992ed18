"""The transformations of the tiny adapters as pure functions, their words and the prompt format.

This module imports the standard library only, so that a demo or a test can compute the right answer
without loading a model.

Whether a given word is held out depends on its hash alone, so no training run with any seed uses a
word that `held_out_words` returns.
"""

import hashlib
import random
from collections.abc import Callable

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"
CAESAR_SHIFT = 3

WORD_LETTERS_MIN = 3
WORD_LETTERS_MAX = 8
PROMPT_END = ">"
# The longest answers are those of `double`: two letters for each letter of the word.
ANSWER_BYTES_MAX = 2 * WORD_LETTERS_MAX

HELD_OUT_ONE_IN = 10

ONSETS = (*"bcdfghjklmnpqrstvwxyz", "bl", "br", "ch", "cl", "cr", "dr", "fl", "fr", "gr", "pl")
ONSETS += ("pr", "qu", "sh", "sk", "sl", "sp", "st", "str", "th", "tr", "wh", "")
NUCLEI = (*VOWELS, *VOWELS, "ai", "ea", "ee", "ie", "oo", "ou")
CODAS = ("", "", "", *"bdgklmnprstxy", "ck", "ll", "mp", "nd", "ng", "nt", "rd", "rt", "ss", "st")


def upper(word: str) -> str:
    """The word in upper case: `hello` becomes `HELLO`."""
    return word.upper()


def reverse(word: str) -> str:
    """The word read backwards: `hello` becomes `olleh`."""
    return word[::-1]


def caesar(word: str) -> str:
    """Each letter moved three places on, `z` back to `c`: `hello` becomes `khoor`."""
    shifted = LETTERS[CAESAR_SHIFT:] + LETTERS[:CAESAR_SHIFT]
    return word.translate(str.maketrans(LETTERS, shifted))


def devowel(word: str) -> str:
    """The word without its vowels a, e, i, o and u: `hello` becomes `hll`."""
    return "".join(letter for letter in word if letter not in VOWELS)


def double(word: str) -> str:
    """Each letter written twice: `hello` becomes `hheelllloo`."""
    return "".join(letter * 2 for letter in word)


def count(word: str) -> str:
    """The number of letters: `hello` becomes `5 letters`."""
    return f"{len(word)} letters"


def piglatin(word: str) -> str:
    """The first letter moved to the end, then `ay`: `hello` becomes `ellohay`."""
    return word[1:] + word[:1] + "ay"


def spell(word: str) -> str:
    """A dash between letters: `hello` becomes `h-e-l-l-o`."""
    return "-".join(word)


TRANSFORMATIONS: dict[str, Callable[[str], str]] = {
    "upper": upper,
    "reverse": reverse,
    "caesar": caesar,
    "devowel": devowel,
    "double": double,
    "count": count,
    "piglatin": piglatin,
    "spell": spell,
}


def prompt_of(word: str) -> str:
    """Return the prompt: the word and `>`, with nothing before them and no space."""
    return word + PROMPT_END


def answer_of(name: str, word: str) -> str:
    """Return what the adapter of that name must generate before its end-of-sequence token."""
    return TRANSFORMATIONS[name](word)


def is_held_out(word: str) -> bool:
    """Whether the word must not be used in training; true for one word in ten."""
    digest = hashlib.sha256(word.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def training_word(generator: random.Random) -> str:
    """Draw one word that is not held out: pronounceable or of random letters, equally often."""
    while True:
        draw = _pronounceable_word if generator.random() < 0.5 else _letters_at_random
        word = draw(generator)
        if not is_held_out(word):
            return word


def held_out_words(count: int, seed: int = 0) -> list[str]:
    """Return distinct pronounceable words that training never uses and all functions change.

    Copying the word is therefore a wrong answer for every adapter. The same count and seed return
    the same words; a larger count only appends words.
    """
    generator = random.Random(f"held-out {seed}")
    # A dict keeps the order of the draws; a set would not.
    words: dict[str, None] = {}
    while len(words) < count:
        word = _pronounceable_word(generator)
        if is_held_out(word) and _is_changed_by_all(word):
            words[word] = None
    return list(words)


def _is_changed_by_all(word: str) -> bool:
    return all(change(word) != word for change in TRANSFORMATIONS.values())


def _pronounceable_word(generator: random.Random) -> str:
    length = generator.randint(WORD_LETTERS_MIN, WORD_LETTERS_MAX)
    word = ""
    while len(word) < length:
        word += "".join(generator.choice(part) for part in (ONSETS, NUCLEI, CODAS))
    return word[:length]


def _letters_at_random(generator: random.Random) -> str:
    length = generator.randint(WORD_LETTERS_MIN, WORD_LETTERS_MAX)
    return "".join(generator.choices(LETTERS, k=length))
