"""The errors of a manager, made from refusals of the controller's core.

Their texts begin with the words that vLLM documents for the same cause, which programs search for.
"""

from collections.abc import Sequence
from typing import Final

from loradock.controller.core.context import Refusal
from loradock.controller.core.in_process import InProcessController
from loradock.engine.errors import (
    DeviceOutOfMemory,
    EngineError,
    LoradockError,
    NoRoom,
    NotRegistered,
    error_of,
)
from loradock.messages import requests
from loradock.messages.errors import ErrorCode

_NO_HOST_PLACE: Final = "No free adapter slots"
_NO_SLOT: Final = "No free lora slots"


def error_of_refusal(
    refusal: Refusal, core: InProcessController, kind: type, names: Sequence[str]
) -> LoradockError:
    """Return the error for a refused request of class `kind` about the adapters `names`."""
    if refusal.code is ErrorCode.UNKNOWN_ADAPTER and kind is requests.HoldAdapter:
        return NotRegistered(f"Pinning failed. LoRA {names[0]} is not registered. Add it first")
    if refusal.code is not ErrorCode.NO_ROOM:
        return error_of(refusal.code, refusal.message)
    host = core.world.tiers["host"]
    is_on_host = all(core.find(name) is not None for name in names)
    is_for_host = kind is requests.StageAdapter or not is_on_host
    missing = _NO_HOST_PLACE if is_for_host and host.count >= host.count_max else _NO_SLOT
    return NoRoom(f"{missing}: {refusal.message}")


def batch_error(
    shortage: str, sizes_bytes: Sequence[int], slots: int, device_bytes: int
) -> EngineError:
    """Return the error for a batch of adapters of these sizes, in `slots` slots of `device_bytes`.

    `shortage` is the core's text.
    """
    largest = max(sizes_bytes, default=0)
    if largest > device_bytes:
        return DeviceOutOfMemory(
            f"an adapter needs {largest} bytes of device memory, the arena has {device_bytes}; "
            "raise device_bytes_max or serve a smaller adapter"
        )
    if len(sizes_bytes) > slots:
        return NoRoom(
            f"{_NO_SLOT}: number of requested LoRAs ({len(sizes_bytes)}) is greater than the "
            f"number of LoRA slots ({slots}); {shortage}"
        )
    return NoRoom(f"{_NO_SLOT}: {shortage}")
