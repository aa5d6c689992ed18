"""Outputs that follow a JSON schema, a regular expression or a choice, by `llguidance`.

A structure is compiled to a grammar by a job, within bounds on its size, depth and work, and after
a probe in a separate process, because no bound of the library covers all that takes long. Each
output has a grammar matcher, which yields the tokens that can come next.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from loradock.engine.errors import Malformed, NotServed
from loradock.engine.serving.grammar_probe import probe_error
from loradock.messages.prompts import Structure

DEPTH_MAX: Final = 64
"""Bound on the nesting of a JSON schema."""

COMPILED_MAX: Final = 64
"""The most compiled structures that are kept for later requests; the least recently used go."""

LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,
}
"""The library's bounds on work and memory, at the start and per token; about 10 ms per token."""

_BITS: Final = 32

NO_NUMBERS: Final = torch.zeros(0, dtype=torch.int64)
"""Stands for a part of a batch's numbers that no row needs."""

# One space, or a line break with its indentation: a model can't continue with spaces for ever.
_JSON_OPTIONS: Final[Any] = {"whitespace_pattern": r" ?|\n {0,32}"}
_ERROR_CHARACTERS: Final = 300


class GrammarMatcher:
    """The tokens that one output may continue with."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """Why the structure can't be followed further; empty while it can."""
        error: str = self._matcher.get_error()
        return _short(error)

    @property
    def is_complete(self) -> bool:
        """True if the output is complete and no token may follow."""
        # An error stops the matcher too.
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def fork(self) -> "GrammarMatcher":
        """Return a matcher in the same state."""
        return GrammarMatcher(self._matcher.deep_copy())

    def append(self, token: int) -> None:
        """Advance by a token that was chosen; one that is not allowed becomes an `error`."""
        self._matcher.consume_token(token)

    @property
    def matcher(self) -> Any:
        """The library's own object."""
        return self._matcher


def masks_of(grammars: Sequence[GrammarMatcher | None], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the rows with a grammar and the masks of the tokens that it allows, on the host.

    grammars: one per row, None for rows without a structure. The rows are [guided] int64. The masks
    have a bit per token, each row's in words of 32; two words are a number of the result, int64.
    All masks are computed together.
    """
    guided = [(row, grammar) for row, grammar in enumerate(grammars) if grammar is not None]
    if not guided:
        return NO_NUMBERS, NO_NUMBERS
    words = -(-vocabulary // _BITS)
    masks = torch.zeros(-(-len(guided) * words // 2), dtype=torch.int64)
    targets = [(grammar.matcher, at) for at, (_, grammar) in enumerate(guided)]
    _executor().unsafe_compute_mask_ptr(targets, masks.data_ptr(), 4 * words, len(guided))
    return torch.tensor([row for row, _ in guided]), masks


def apply_masks(rows: Tensor, masks: Tensor, logits: Tensor) -> Tensor:
    """Return the logits with -inf for the tokens that a row's mask does not allow.

    rows, masks: those of `masks_of`, on the device of `logits`. logits: [rows, vocabulary],
    unchanged; the same tensor is returned if no row has a mask.
    """
    if not len(rows):
        return logits
    vocabulary = logits.shape[-1]
    words = -(-vocabulary // _BITS)
    own = masks.view(torch.int32)[: len(rows) * words].view(-1, words, 1)
    bits = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    forbidden = ((own >> bits) & 1).flatten(1)[:, :vocabulary] == 0
    masked = logits.clone()
    masked[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
    return masked


@cache
def _executor() -> Any:
    """Return the threads that compute masks."""
    from llguidance import LLExecutor  # noqa: PLC0415 - optional

    return LLExecutor()


class GrammarCompiler:
    """Compiles structures for one model's tokenizer; used by jobs, at the same time.

    `vocabulary`: the number of logits. `end_ids`: the tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_ids = sorted(end_ids)
        self._lock = Lock()
        self._words: Any = None
        self._compiled: OrderedDict[Structure, GrammarMatcher] = OrderedDict()

    def known(self, structure: Structure) -> GrammarMatcher | None:
        """Return a grammar matcher of a structure that was compiled before; otherwise None."""
        with self._lock:
            known = self._compiled.get(structure)
            if known is None:
                return None
            self._compiled.move_to_end(structure)
            return known.fork()

    def compile(self, structure: Structure) -> GrammarMatcher:
        """Return a grammar matcher at the beginning of an output.

        Raises `Malformed` for a structure that can't be compiled within the bounds, and
        `NotServed` if the library is not installed or can't read the tokenizer.
        """
        known = self.known(structure)
        if known is not None:
            return known
        with self._lock:
            words = self._words = self._words or self._read_tokenizer()
        source = _grammar(structure)
        error = "" if structure.kind == "choice" else probe_error(source, LIMITS)
        grammar = None if error else GrammarMatcher(_matcher(words, source))
        if grammar is None or grammar.error:
            reason = _short(error) if grammar is None else grammar.error
            raise Malformed(f"the structure can't be used: {reason}")
        with self._lock:
            self._compiled[structure] = grammar
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return grammar.fork()

    def _read_tokenizer(self) -> Any:
        try:
            # Optional, and not needed before the first structure.
            from llguidance.hf import from_tokenizer  # noqa: PLC0415
        except ImportError as error:
            raise NotServed(
                "structured outputs need llguidance: pip install 'loradock[structured]'"
            ) from error
        try:
            end_ids: list[int] | None = self._end_ids or None
            return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=end_ids)
        except (ValueError, TypeError, AttributeError) as error:
            raise NotServed(
                f"structured outputs are not served with this model's tokenizer: {error}"
            ) from error


def _matcher(words: Any, grammar: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - as above

    limits = LLParserLimits(**LIMITS)
    return LLMatcher(words, grammar, log_level=0, limits=limits)


def _grammar(structure: Structure) -> str:
    """Return the library's grammar of a structure; raises `Malformed`."""
    from llguidance import LLMatcher  # noqa: PLC0415 - as above

    if structure.kind == "json_schema":
        schema = _checked_schema(structure.text)
        grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    elif structure.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(structure.text)
    else:
        if not structure.choices:
            raise Malformed("a structure of kind choice has no choices")
        texts = (json.dumps(choice, ensure_ascii=False) for choice in structure.choices)
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    return grammar


def _checked_schema(text: str) -> str:
    """Return a JSON schema; raises `Malformed` for one that is no JSON or nested deeply."""
    text = text or '{"type": "object"}'
    depth = depth_max = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        depth_max = max(depth, depth_max)
    if depth_max > DEPTH_MAX:
        raise Malformed(f"a JSON schema nested deeper than {DEPTH_MAX}")
    try:
        json.loads(text)
    except ValueError as error:
        raise Malformed(f"the JSON schema is not JSON: {error}") from error
    return text


def _short(text: str) -> str:
    return " ".join(text.split())[:_ERROR_CHARACTERS]
