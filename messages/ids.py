"""The names by which the processes speak of things, with the bounds that the wire enforces.

What it is: annotated aliases and the five life-cycle states. What it is not: a place for anything
that has fields. One rule: an identifier that passes decoding is safe to log and to show.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta

# ``\Z`` and not ``$``, which would also accept a trailing newline; no name may walk upwards.
NAME_PATTERN: Final = r"^(?!.*\.\.)(?!\.\Z)[A-Za-z0-9._-]{1,128}\Z"

AdapterName = Annotated[str, Meta(pattern=NAME_PATTERN)]
"""A client's name for an adapter, across all its versions."""

AdapterId = Annotated[int, Meta(ge=0, le=2**53)]
"""One version of an adapter: other bytes under the same name get another id. 0 is the base."""

REQUEST_PATTERN: Final = r"^[!-~]{1,64}\Z"

RequestId = Annotated[str, Meta(pattern=REQUEST_PATTERN)]
"""Chosen by the client, unique for ever; a repeated one gets its first answer again."""

OpId = Annotated[int, Meta(ge=0, le=2**53)]
"""One operation that the controller asked of the engine; ids only grow."""

Slot = Annotated[int, Meta(ge=-1, le=65_535)]
"""A row of the device directory; -1 means none (the base model)."""

Generation = Annotated[int, Meta(ge=0, le=2**53)]
"""Grows with every write of a slot, so that a stale mapping can be told; 0 means never written."""

Seq = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A position in a numbered stream: log records, published events, frames of one link."""

Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""One life of the controller; grows with every start. 0 means not known yet."""

TimeoutMs = Annotated[int, Meta(ge=0, le=3_600_000)]
"""How long a client is willing to wait, in milliseconds; 0 takes the controller's default."""

Path = Annotated[str, Meta(max_length=4096)]
"""An adapter's directory, absolute or relative to an adapter root; empty means the name."""

Bytes = Annotated[int, Meta(ge=0, le=2**53)]
"""A size in bytes."""

AdapterState = Literal["unregistered", "evicted", "cpu-cached", "pinned", "gpu-slot"]

UNREGISTERED: Final = "unregistered"
EVICTED: Final = "evicted"
CPU_CACHED: Final = "cpu-cached"
PINNED: Final = "pinned"
GPU_SLOT: Final = "gpu-slot"

NO_SLOT: Final = -1
BASE_MODEL: Final = 0
