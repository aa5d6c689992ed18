"""States of prompts' beginnings, which later prompts of a model with recurrent states continue.

Keys and values can be cut at any token; a recurrent state belongs to one end alone. So the states
of a prompt are copied where another prompt can be expected to continue: at the end of its last full
block, as the next turn of a conversation does, and where it leaves the beginning of an earlier
prompt, as prompts with a common instruction do. The second prompt with an instruction stores its
states, and the third one begins with them.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loradock.engine.models.row_cache import RowStates, states_bytes
from loradock.engine.serving.blocks import BLOCK_TOKENS

STORED_TOKENS_MIN: Final = 64
"""The fewest tokens between two ends of a prompt that are stored: each divides its prefill."""

_SEEN_MAX: Final = 1 << 17
"""The most blocks of earlier prompts that are remembered, by 16 bytes each."""


class Beginning(NamedTuple):
    """How a prompt is prefilled: it begins with `states` of its first `tokens` tokens.

    `keys`: of its full blocks. `stored`: the keys under which its states are to be stored, by
    number of tokens.
    """

    tokens: int = 0
    states: Any = None
    keys: Sequence[bytes] = ()
    stored: Mapping[int, bytes] = MappingProxyType({})


class PrefixStates:
    """Stored states by the key of their last block; the least recently used are dropped.

    `bytes_max`: of all stored states; 0 stores none. Ranks that hold one model have the same ends
    in the same order, because their states are of equal size.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max: Final = bytes_max
        self._size_bytes = 0
        self._stored: OrderedDict[bytes, Any] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> Beginning:
        """Return how to prefill a prompt; keys: of its full blocks that other prompts can share."""
        begun = next((end for end in range(len(keys), 0, -1) if keys[end - 1] in self._stored), 0)
        states = None
        if begun:
            states = self._stored[keys[begun - 1]]
            self._stored.move_to_end(keys[begun - 1])
        shared = next((end for end, key in enumerate(keys) if key not in self._seen), len(keys))
        stored: dict[int, bytes] = {}
        last = begun * BLOCK_TOKENS
        for end in (shared, len(keys)):
            if end * BLOCK_TOKENS - last >= STORED_TOKENS_MIN:
                last = end * BLOCK_TOKENS
                stored[last] = keys[end - 1]
        return Beginning(begun * BLOCK_TOKENS, states, keys, stored)

    def record(self, keys: Sequence[bytes]) -> None:
        """Remember the blocks of a prompt that is prefilled now."""
        # The end is forgotten first: it is of no use without its beginning.
        for key in reversed(keys):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)

    def store(self, key: bytes, cache: RowStates, row: int) -> None:
        """Store a copy of the states of a row, whose tokens end with the block `key`."""
        if key in self._stored:
            return
        states = cache.copy_states(row)
        size_bytes = states_bytes(states)
        if size_bytes > self.bytes_max:
            return
        self._stored[key] = states
        self._size_bytes += size_bytes
        while self._size_bytes > self.bytes_max:
            _, dropped = self._stored.popitem(last=False)
            self._size_bytes -= states_bytes(dropped)

    def clear(self) -> None:
        """Drop all states."""
        self._stored.clear()
        self._size_bytes = 0
