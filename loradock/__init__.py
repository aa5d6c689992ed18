"""LoRADock's public names: clients, managers, configurations and errors.

    from loradock import Client

    with Client(".loradock") as client:
        print(client.generate("hello>", "reverse", max_tokens=16).text())

A name is imported on its first use, so a program that uses a client never imports torch. Its
subpackages may change between versions.
"""

# The names of clients are listed in their package.
# ruff: noqa: F403, F405

from typing import TYPE_CHECKING, Final

from loradock.messages import VERSION

if TYPE_CHECKING:
    from loradock.client import *
    from loradock.engine.adapters import LoRAModel, LoRARequest, PEFTHelper
    from loradock.engine.config import AdapterBounds, EngineConfig, LoRAConfig
    from loradock.engine.errors import EngineError, ModelRefused
    from loradock.engine.manager import (
        LoRAModelManager,
        LRUCacheLoRAModelManager,
        LRUCacheWorkerLoRAManager,
        WorkerLoRAManager,
        create_lora_manager,
    )
    from loradock.engine.punica import LoRAMapping, LoRAMappingType
    from loradock.messages.errors import ErrorCode

__all__ = [
    "ERRORS",
    "AdapterBounds",
    "AdapterConfigRefused",
    "AdapterDoesNotFit",
    "AdapterNotFound",
    "AsyncClient",
    "AsyncEventStream",
    "AsyncGeneration",
    "Classification",
    "Client",
    "Conflict",
    "DeviceOutOfMemory",
    "Embedding",
    "EngineConfig",
    "EngineError",
    "EngineGone",
    "ErrorCode",
    "EventStream",
    "Gap",
    "Generation",
    "HandlingFailed",
    "ImageSource",
    "LRUCacheLoRAModelManager",
    "LRUCacheWorkerLoRAManager",
    "LoRAConfig",
    "LoRAMapping",
    "LoRAMappingType",
    "LoRAModel",
    "LoRAModelManager",
    "LoRARequest",
    "LogUnavailable",
    "LoradockError",
    "Malformed",
    "ModelRefused",
    "NoRoom",
    "NotAllowed",
    "NotFinite",
    "NotResident",
    "NotServed",
    "Overloaded",
    "PEFTHelper",
    "PathNotAllowed",
    "ServerStops",
    "Snapshot",
    "Structure",
    "Timing",
    "UnknownAdapter",
    "WorkerLoRAManager",
    "__version__",
    "create_lora_manager",
]

__version__: Final = VERSION

_ENGINE_LIBRARIES = ("torch", "transformers", "triton", "re2", "safetensors", "PIL")
_CONFIGURATION = ("AdapterBounds", "EngineConfig", "LoRAConfig")
_ENGINE_ERRORS = ("EngineError", "ModelRefused")
_ADAPTERS = ("LoRAModel", "LoRARequest", "PEFTHelper")
_MAPPING = ("LoRAMapping", "LoRAMappingType")
_MANAGERS = (
    *("LRUCacheLoRAModelManager", "LRUCacheWorkerLoRAManager", "LoRAModelManager"),
    *("WorkerLoRAManager", "create_lora_manager"),
)


def __getattr__(name: str) -> object:
    """Import a public name from its package; raises AttributeError for any other."""
    if name not in __all__:
        raise AttributeError(f"module 'loradock' has no attribute {name!r}")
    try:
        value = _imported(name)
    except ModuleNotFoundError as error:
        if error.name not in _ENGINE_LIBRARIES:
            raise
        text = f"loradock.{name} needs {error.name}: pip install 'loradock[serve]'"
        raise ModuleNotFoundError(text, name=error.name) from error
    # The next use finds it in the module.
    globals()[name] = value
    return value


def _imported(name: str) -> object:  # noqa: PLR0911 - one per package
    """Import the package of a public name, and no other; return the name's value."""
    # ruff: noqa: PLC0415
    if name == "ErrorCode":
        from loradock.messages import errors

        return getattr(errors, name)
    if name in _CONFIGURATION:
        from loradock.engine import config

        return getattr(config, name)
    if name in _ENGINE_ERRORS:
        from loradock.engine import errors as engine_errors

        return getattr(engine_errors, name)
    if name in _ADAPTERS:
        from loradock.engine import adapters

        return getattr(adapters, name)
    if name in _MAPPING:
        from loradock.engine import punica

        return getattr(punica, name)
    if name in _MANAGERS:
        from loradock.engine import manager

        return getattr(manager, name)
    from loradock import client

    return getattr(client, name)


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return __all__
