"""What images add to a forward pass: of one prompt, and of all prompts of a prefill together.

What it is: tensors by the names that the model's forward has for them, and their joining. What it
is not: a reader of images (`engine.processor`), or anything of a decode step, which brings text
alone. One rule: what belongs to a row stays with it; nothing of an image lives in the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Media:
    """One prompt's images as its model takes them; everything lies on the host.

    tensors: what describes the images, each with the images (or their tiles, patches...) first.
    token_types: what each token stands for, [tokens]. positions: where the model counts positions
    by more than tokens, [axes, tokens]; else None. offset: how much further the position of the
    next token is than the number of tokens before it. images: how many they are.
    """

    tensors: Mapping[str, Tensor]
    token_types: Mapping[str, Tensor]
    positions: Tensor | None
    offset: int
    images: int


def offsets_of(media: Sequence[Media | None]) -> list[int]:
    """How much further each row's next position is than the number of its tokens."""
    return [0 if one is None else one.offset for one in media]


def media_arguments(media: Sequence[Media | None], positions: Tensor) -> dict[str, Any]:
    """What a forward of left-padded rows takes beside its tokens, some rows having images.

    positions: [rows, tokens] int64, of rows without images; the others' own are put in their place.
    """
    arguments: dict[str, Any] = {"position_ids": _positions(media, positions)}
    own = [one for one in media if one is not None]
    for name in dict.fromkeys(name for one in own for name in one.tensors):
        arguments[name] = joined([one.tensors[name] for one in own])
    for name in dict.fromkeys(name for one in own for name in one.token_types):
        arguments[name] = torch.zeros_like(positions)
        for row, one in enumerate(media):
            if one is not None:
                types = one.token_types[name]
                arguments[name][row, -len(types) :] = types
    return arguments


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors one after the other; what is smaller is filled with zeros at its end.

    So do the processors themselves with the images of a batch: zeros are no pixels and no tile.
    """
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_widened(tensor, sizes) for tensor in tensors])


def _widened(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [wanted - own for wanted, own in zip(sizes, tensor.shape[1:], strict=True)]
    return pad(tensor, [amount for size in reversed(missing) for amount in (0, size)])


def _positions(media: Sequence[Media | None], positions: Tensor) -> Tensor:
    own = {row: one.positions for row, one in enumerate(media) if one and one.positions is not None}
    if not own:
        return positions
    (axes,) = {len(found) for found in own.values()}
    every = positions.repeat(axes, 1, 1)
    for row, found in own.items():
        every[:, row, -found.shape[1] :] = found
    return every
