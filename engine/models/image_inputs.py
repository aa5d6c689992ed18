"""Arguments that images add to a model's forward, per prompt and for all rows of a prefill.

Everything of a row's images is stored with the row, because rows join and leave the batch. What a
model remembers of its last prompt is never used. Decode steps contain text alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class ImageInputs:
    """One prompt's images as arguments of its model's forward, on the host.

    tensors: by argument name, each with the images (or their tiles, patches...) as the first axis.
    token_types: by argument name, the kind of each token, [tokens]. positions: [axes, tokens] where
    the model counts positions in several axes; else None. offset: the position of the next token
    minus the number of tokens before it.
    """

    tensors: Mapping[str, Tensor]
    token_types: Mapping[str, Tensor]
    positions: Tensor | None
    offset: int

    @property
    def digest(self) -> bytes:
        """A digest of everything that the images add to the model's inputs."""
        found = blake2b(digest_size=16)
        named = {**self.tensors, **self.token_types, "positions": self.positions}
        for name, tensor in sorted(named.items()):
            if tensor is not None:
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.digest()


def position_offsets(inputs: Sequence[ImageInputs | None]) -> list[int]:
    """Return the position of each row's next token minus the number of its tokens."""
    return [0 if one is None else one.offset for one in inputs]


def image_arguments(inputs: Sequence[ImageInputs | None], positions: Tensor) -> dict[str, Any]:
    """Return the arguments of a forward of left-padded rows, some of which have images.

    inputs: one entry per row. positions: [rows, tokens] int64, of rows without images; rows with
    their own positions replace them.
    """
    arguments: dict[str, Any] = {"position_ids": _positions(inputs, positions)}
    present = [one for one in inputs if one is not None]
    for name in dict.fromkeys(name for one in present for name in one.tensors):
        arguments[name] = concatenate_padded([one.tensors[name] for one in present])
    for name in dict.fromkeys(name for one in present for name in one.token_types):
        arguments[name] = torch.zeros_like(positions)
        for row, one in enumerate(inputs):
            if one is not None:
                types = one.token_types[name]
                arguments[name][row, -len(types) :] = types
    return arguments


def concatenate_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors on their first axis, padded with zeros at the end of the other axes.

    Processors pad the images of a batch the same way: zeros are neither pixels nor tiles.
    """
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_padded(tensor, sizes) for tensor in tensors])


def _padded(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - current for size, current in zip(sizes, tensor.shape[1:], strict=True)]
    return pad(tensor, [amount for size in reversed(missing) for amount in (0, size)])


def _positions(inputs: Sequence[ImageInputs | None], positions: Tensor) -> Tensor:
    by_row = {
        row: one.positions for row, one in enumerate(inputs) if one and one.positions is not None
    }
    if not by_row:
        return positions
    (axes,) = {len(found) for found in by_row.values()}
    result = positions.repeat(axes, 1, 1)
    for row, found in by_row.items():
        result[:, row, -found.shape[1] :] = found
    return result
