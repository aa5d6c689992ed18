"""Attention over blocks of keys and values: its operands, and the signature of the operation.

A block has the keys and values of `block_tokens` tokens of a sequence, in the order of these. A
table has the blocks of each sequence, so that sequences can share blocks and nothing is copied.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class BlockOperands(NamedTuple):
    """New tokens of several sequences, and the blocks that each sequence has.

    Tensors are integers on the device, so that a captured launch reads their current contents.
    begins: [rows + 1], the new tokens of row r are `begins[r]` to `begins[r + 1]`, in the order of
    the sequence. firsts: [rows], the index in the sequence of the first of them. rows: [rows], each
    row's row of `table`. table: [any, width]: entry [rows[r], n] is the block with the tokens from
    `n * block_tokens` on; tokens that nothing attends to need no entry. longest: at least the
    tokens of each sequence, the new ones included. is_decode: whether each row has one new token.
    shared: None, or, only for decode steps, [rows, 1 + any]: the tokens at its beginning that a row
    has in common with others, then the rows whose queries can be attended together to as many
    tokens of this row, -1 for none. Each row with such tokens is in one of the lists, that of a row
    with as many. The result does not depend on it.
    """

    begins: Tensor
    firsts: Tensor
    rows: Tensor
    table: Tensor
    block_tokens: int
    longest: int
    is_decode: bool
    shared: Tensor | None = None


class AttentionOptions(NamedTuple):
    """A layer's scores, and the tokens before itself that a token attends to.

    scale: None for the inverse root of the width. softcap: bounds scores by a tanh; 0 does not.
    sinks: one more score per head, [heads], whose weight is dropped. window: the most tokens, the
    own one included. chunk: only tokens of the same multiple of `chunk`. 0: no bound.
    """

    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    window: int = 0
    chunk: int = 0


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, BlockOperands, AttentionOptions], None]
"""(y, query, keys, values, blocks, options); specified by `attend_reference`."""

WriteTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(keys, values, new_keys, new_values, places); specified by `write_tokens`."""


class BlockAttention(NamedTuple):
    """Both operations on blocks: new tokens are written, then attended with the others.

    shared_rows: the most rows that `attend` attends together to tokens that they share; 0 if it
    attends all rows alone. shared_tokens: how many tokens fewer must be read so that this pays.
    """

    attend: Attend
    write: WriteTokens
    shared_rows: int = 0
    shared_tokens: int = 0


def check_attention(
    y: Tensor, query: Tensor, keys: Tensor, values: Tensor, blocks: BlockOperands
) -> None:
    """Raise ValueError unless `attend_reference` is defined for these shapes and dtypes."""
    heads, tokens, width = query.shape
    problem = ""
    if heads % len(keys):
        problem = f"{heads} query heads can't be divided among {len(keys)} heads of keys"
    elif keys.shape[2] != width or keys.shape[:2] != values.shape[:2]:
        problem = f"keys of {[*keys.shape]} and values of {[*values.shape]} for a width of {width}"
    elif tuple(y.shape) != (tokens, heads, values.shape[2]) or not y.is_contiguous():
        problem = f"an output of {[*y.shape]}, or not contiguous, for {tokens} tokens"
    elif not query.dtype == keys.dtype == values.dtype == y.dtype:
        problem = f"queries of {query.dtype}, keys of {keys.dtype} and values of {values.dtype}"
    elif query.stride(2) != 1 or not (keys[0].is_contiguous() and values[0].is_contiguous()):
        problem = "a head is not contiguous"
    elif len(blocks.begins) != len(blocks.rows) + 1 or len(blocks.firsts) != len(blocks.rows):
        problem = f"{len(blocks.begins)} beginnings for {len(blocks.rows)} rows"
    elif blocks.shared is not None and not blocks.is_decode:
        problem = "rows that share tokens, and have several new ones"
    if problem:
        raise ValueError(f"attention over blocks: {problem}")


def write_tokens(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, places: Tensor
) -> None:
    """Write new tokens' keys and values to their places, by PyTorch's functions.

    keys: [heads, all places, width], values: [heads, all places, v_width]; new_keys: [heads,
    tokens, width], new_values: [heads, tokens, v_width], of any strides. places: [tokens] int64.
    """
    keys.index_copy_(1, places, new_keys)
    values.index_copy_(1, places, new_values)
