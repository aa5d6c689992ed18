"""What each tiny adapter does to a word, as pure functions; the words and the prompt format.

This module knows nothing of models, tensors or files and imports the standard library only, so
that a demo or a test can tell the right answer without loading anything.

One rule: a word is held out or not by a hash of the word alone, so no training run, whatever its
seed, can ever have seen a word that `held_out_words` returns.
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
    """The text the model is given: the word and `>`, nothing before, no blank."""
    return word + PROMPT_END


def answer_of(name: str, word: str) -> str:
    """What the adapter of that name must generate before its end-of-sequence token."""
    return TRANSFORMATIONS[name](word)


def is_held_out(word: str) -> bool:
    """Whether training must never see the word; one word in ten."""
    digest = hashlib.sha256(word.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def training_word(generator: random.Random) -> str:
    """A word that is not held out, half of them pronounceable and half letters at random."""
    while True:
        draw = _pronounceable_word if generator.random() < 0.5 else _letters_at_random
        word = draw(generator)
        if not is_held_out(word):
            return word


def held_out_words(count: int, seed: int = 0) -> list[str]:
    """Distinct pronounceable words no training has seen and every transformation changes.

    Copying the word is therefore a wrong answer for every adapter. The same count and seed give
    the same words; a greater count only adds to the end.
    """
    generator = random.Random(f"held-out {seed}")
    # A dict keeps the order in which words were drawn; a set would not.
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
