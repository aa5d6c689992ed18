"""Adapters that are loaded at the start (`--lora-modules`)."""

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from loradock.client import AsyncClient, LoradockError
from loradock.gateway.adapters.names import is_adapter_name

_RETRY_S: Final = 1.0

log = structlog.get_logger("gateway")


class LoraModule(Struct, frozen=True):
    """An adapter of the command line; `base_model_name` is read for vLLM's sake and not used."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_modules(options: Iterable[str]) -> tuple[LoraModule, ...]:
    """Parse `NAME=PATH` or JSON; raises `ValueError` for what is malformed or repeated."""
    modules: dict[str, LoraModule] = {}
    for option in options:
        module = _parse(option)
        if not is_adapter_name(module.name):
            raise ValueError(f"--lora-modules: {module.name!r} is not a valid adapter name")
        if module.name in modules:
            raise ValueError(f"--lora-modules: {module.name!r} occurs twice")
        modules[module.name] = module
    return tuple(modules.values())


def _parse(option: str) -> LoraModule:
    if option.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(option, type=LoraModule)
        except msgspec.MsgspecError as error:
            raise ValueError(f"--lora-modules {option}: {error}") from error
    name, _, path = option.partition("=")
    if not name or not path:
        raise ValueError(f"--lora-modules {option!r}: NAME=PATH or JSON is needed")
    return LoraModule(name, path)


async def load_modules(client: AsyncClient, modules: Iterable[LoraModule]) -> None:
    """Load all of them, waiting for controller and engine as long as needed.

    Raises `LoradockError` for one that can't be loaded.
    """
    for module in modules:
        while True:
            try:
                await client.load(module.name, module.path)
            except LoradockError as error:
                if not error.retryable:
                    raise
                log.info("an adapter is loaded later", adapter=module.name, reason=str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                break
