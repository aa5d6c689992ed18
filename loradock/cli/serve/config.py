"""The options of `loradock serve` itself, and the configuration that all its options make."""

from typing import Annotated, ClassVar, Literal

from msgspec import Struct

from loradock.controller.server.config import ServerConfig
from loradock.gateway.options import GatewayConfig
from loradock.messages.engine_options import (
    STEP_TIMEOUT_MS,
    AdapterRoots,
    EngineOptions,
    LogFormat,
    LogLevel,
    LoRAOptions,
    TensorParallelSize,
)
from loradock.messages.options import option

_HOUR_MS = 3_600_000


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The options of `serve` that are not of one process alone; durations in milliseconds."""

    PANEL: ClassVar = "Server"

    model: Annotated[
        str,
        option(
            "Directory of the base model. Needed, except with --engine external.",
            metavar="DIRECTORY",
            is_common=True,
        ),
    ] = ""
    adapter_roots: AdapterRoots = ()
    adapters: Annotated[
        tuple[str, ...],
        option(
            "Adapter to load when the server starts; PATH as in `loradock load`. Repeat for "
            "several. Default: none.",
            metavar="NAME=PATH",
            is_common=True,
        ),
    ] = ()
    http: Annotated[
        str,
        option(
            "Also serve the OpenAI protocol, metrics and a page at this address. Default: no HTTP.",
            metavar="HOST:PORT",
            is_common=True,
        ),
    ] = ""
    join: Annotated[
        str,
        option(
            "Be a dock of a fleet: the file that `loradock fleet init` has written. Needs --http. "
            "Default: no fleet.",
            metavar="FILE",
            is_common=True,
        ),
    ] = ""
    listen: Annotated[
        str,
        option(
            "Accept clients over a network, at this port and the two after it, encrypted and with "
            "a key that `loradock keys allow` has admitted. Default: only local clients.",
            metavar="tcp://HOST:PORT",
            is_common=True,
        ),
    ] = ""
    tensor_parallel_size: TensorParallelSize = 1
    accept_changes: Annotated[
        bool,
        option(
            "Serve a directory with another model, or with lower limits, than before. Adapters "
            "that do not fit are evicted or refused.",
            is_common=True,
        ),
    ] = False
    log_format: Annotated[
        LogFormat,
        option(
            "Format of the log on stderr, for all processes; --json implies json.",
            is_common=True,
        ),
    ] = "console"
    log_level: Annotated[LogLevel, option("Least important lines of the log that are written.")] = (
        "info"
    )
    engine: Annotated[
        Literal["managed", "external"],
        option(
            "managed starts an engine; external waits for an engine that is started elsewhere, "
            "with `loradock engine run`."
        ),
    ] = "managed"
    hang_timeout_ms: Annotated[
        int,
        option(
            "The controller or the engine is killed within this time if it is stopped (SIGSTOP), "
            "and restarted.",
            ge=1,
            le=_HOUR_MS,
            unit="seconds",
        ),
    ] = 2_000
    step_timeout_ms: Annotated[
        int,
        option(
            "The engine is killed and restarted if one step of its main loop, for example a "
            "forward pass, takes longer.",
            ge=1,
            le=_HOUR_MS,
            unit="seconds",
        ),
    ] = STEP_TIMEOUT_MS


class ServeConfig(Struct, frozen=True):
    """Processes of `serve`: a controller, an engine unless it is external, and a gateway if any."""

    server: ServerConfig
    options: ServeOptions = ServeOptions()
    lora: LoRAOptions = LoRAOptions()
    engine: EngineOptions = EngineOptions()
    gateway: GatewayConfig | None = None
