"""Adapters that a gateway loads by itself: `--lora-modules`, and names that a resolver finds.

A resolver is a directory below which adapters are looked up, or an installed plugin: an entry point
of the group `loradock.lora_resolvers` that is a callable from the base model's name and the unknown
name to a path, or to None. The path then has to be below an adapter root of the engine.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence

# Only installed entry points that an operator names are loaded.
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from msgspec import Struct

from loradock.client import AsyncClient, LoradockError
from loradock.messages.ids import NAME_PATTERN

RESOLVER_GROUP: Final = "loradock.lora_resolvers"
ADAPTER_CONFIG: Final = "adapter_config.json"

Resolver = Callable[[str, str], str | Awaitable[str | None] | None]
"""From the base model's name and an unknown name to an adapter's directory."""

_ADAPTER: Final = re.compile(NAME_PATTERN)
_RETRY_S: Final = 1.0

log = structlog.get_logger("gateway")


def is_adapter_name(name: str) -> bool:
    """Whether an adapter can have this name."""
    return _ADAPTER.search(name) is not None


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
        raise ValueError(f"--lora-modules must be NAME=PATH or JSON, got {option!r}")
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


class ResolverError(Exception):
    """A resolver that can't be used."""


class DirectoryResolver:
    """Looks up a name as a directory directly below a root; links that leave it are refused."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()
        if not self._root.is_dir():
            raise ResolverError(f"--lora-resolver-root {root} is not a directory")

    def __call__(self, base: str, name: str) -> str | None:
        """Return the directory of an adapter with this name; None if there is none."""
        del base
        path = (self._root / name).resolve()
        if path.parent != self._root or not (path / ADAPTER_CONFIG).is_file():
            return None
        return str(path)


def installed_resolver(name: str) -> Resolver:
    """Return the installed plugin of this name; raises `ResolverError`."""
    found = entry_points(group=RESOLVER_GROUP, name=name)
    if not found:
        known = ", ".join(sorted(entry_points(group=RESOLVER_GROUP).names)) or "none"
        raise ResolverError(f"--lora-resolver {name} is not installed; installed are: {known}")
    resolver = next(iter(found)).load()
    if not callable(resolver):
        raise ResolverError(f"--lora-resolver {name} is not callable")
    loaded: Resolver = resolver
    return loaded


def configured_resolvers(roots: Sequence[str], plugins: Sequence[str]) -> tuple[Resolver, ...]:
    """Return the resolvers of the options, directories first; raises `ResolverError`."""
    return (*map(DirectoryResolver, roots), *map(installed_resolver, plugins))


class Resolution:
    """Resolves and loads unknown names; concurrent requests for one name share one resolution."""

    def __init__(self, client: AsyncClient, resolvers: Sequence[Resolver]) -> None:
        self._client = client
        self._resolvers = resolvers
        self._running: dict[str, asyncio.Task[bool]] = {}

    async def resolve(self, base: str, name: str) -> bool:
        """Load the adapter of an unknown name; False if no resolver finds it.

        Raises `LoradockError` if it is found and can't be loaded.
        """
        if not self._resolvers:
            return False
        task = self._running.get(name)
        if task is None:
            task = asyncio.create_task(self._resolve(base, name))
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        # A request that is abandoned does not end the load that others wait for.
        return await asyncio.shield(task)

    async def _resolve(self, base: str, name: str) -> bool:
        for resolver in self._resolvers:
            path = await _call(resolver, base, name)
            if path is not None:
                log.info("an unknown model name was resolved", name=name, path=path)
                await self._client.load(name, path)
                return True
        return False


async def _call(resolver: Resolver, base: str, name: str) -> str | None:
    if inspect.iscoroutinefunction(resolver):
        path: str | None = await resolver(base, name)
        return path
    # A plugin that blocks must not stop the event loop.
    found: Any = await asyncio.to_thread(lambda: resolver(base, name))
    return str(found) if found is not None else None
