"""What one state says of itself.

What it is: the shape of a row group and the names of the inputs. What it is not: the rows. One
rule: an input is called like the message that carries it.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from messages.ids import AdapterState

WEIGHTS_LOADED: Final = "WeightsLoaded"
WEIGHTS_STAGED: Final = "WeightsStaged"
WEIGHTS_UNSTAGED: Final = "WeightsUnstaged"
WEIGHTS_DROPPED: Final = "WeightsDropped"
SLOT_WRITTEN: Final = "SlotWritten"
SLOT_RESET: Final = "SlotReset"
ENGINE_LOST: Final = "EngineLost"
ADAPTER_REMOVED: Final = "AdapterRemoved"

INPUTS: Final = (
    WEIGHTS_LOADED,
    WEIGHTS_STAGED,
    WEIGHTS_UNSTAGED,
    WEIGHTS_DROPPED,
    SLOT_WRITTEN,
    SLOT_RESET,
    ENGINE_LOST,
    ADAPTER_REMOVED,
)


class State(NamedTuple):
    """One state: the fact it stands for, the memory it takes, and its moves."""

    name: AdapterState
    fact: str
    host: str
    device: str
    moves: Mapping[str, AdapterState]
