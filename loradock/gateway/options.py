"""The options of a gateway process, defined once.

`loradock gateway` and `loradock serve` have the options of `GatewayOptions`, and the process
receives `GatewayConfig` as JSON.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Struct

from loradock.gateway.address import HOST_DEFAULT
from loradock.messages.engine_options import LogFormat
from loradock.messages.options import option

PORT_DEFAULT: Final = 8000

UPDATING_VARIABLE: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_TRUE: Final = ("1", "true", "yes", "on")
"""The environment variable that allows adapters to be changed over HTTP, as in vLLM."""

AUTO_PARSER: Final = "auto"
"""Stands for the format of tool calls that the chat template shows."""

KEYS_VARIABLES: Final = ("LORADOCK_API_KEY", "VLLM_API_KEY")
"""Environment variables that can contain an API key."""


class GatewayOptions(Struct, frozen=True, kw_only=True):
    """The options that both commands have; sizes in bytes, durations in seconds."""

    PANEL: ClassVar = "HTTP gateway"

    api_keys: Annotated[
        tuple[str, ...],
        option(
            "Key that requests have to send as `Authorization: Bearer KEY`; repeat for several. "
            "Default: the variables LORADOCK_API_KEY and VLLM_API_KEY.",
            metavar="KEY",
            is_common=True,
            is_secret=True,
        ),
    ] = ()
    api_key_file: Annotated[
        str, option("File with one API key per line. Default: none.", metavar="FILE")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        option(
            "Name under which requests can address the gateway; repeat for several, * for any. "
            "Default: any with an API key, HTTPS or a network's address; otherwise localhost, "
            "127.0.0.1, ::1 and the address of --http, so that no web page can reach it.",
            metavar="HOST",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        option(
            "Web site whose pages can read answers in a browser (CORS), as https://example.org; "
            "several, a JSON list, or * for any. Default: none.",
            flag="--allowed-origins",
            metavar="ORIGIN",
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...],
        option(
            "Method that pages of --allowed-origins can use; several, or a JSON list. Default: "
            "all.",
            flag="--allowed-methods",
            metavar="METHOD",
        ),
    ] = ()
    allowed_headers: Annotated[
        tuple[str, ...],
        option(
            "Header that pages of --allowed-origins can send; several, or a JSON list. Default: "
            "all.",
            flag="--allowed-headers",
            metavar="HEADER",
        ),
    ] = ()
    allow_credentials: Annotated[
        bool,
        option("Let pages of --allowed-origins send cookies and certificates of their users."),
    ] = False
    client_header: Annotated[
        str,
        option(
            "Header that tells HTTP clients apart, as X-Forwarded-For behind a proxy that sets it; "
            "clients have equal shares. An API key precedes it. Default: none, so that clients "
            "without a key are told apart by their addresses.",
            metavar="NAME",
        ),
    ] = ""
    root_path: Annotated[
        str,
        option(
            "Prefix of all paths at a proxy in front of the gateway, as /llm; requests can have "
            "it or not. Default: none.",
            metavar="PATH",
        ),
    ] = ""
    ssl_keyfile: Annotated[str, option("Private key for HTTPS. Default: none.", metavar="FILE")] = (
        ""
    )
    ssl_certfile: Annotated[
        str, option("Certificate for HTTPS. Default: none.", metavar="FILE")
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        option(
            "Certificates of authorities; clients need a certificate that one of them signed. "
            "Default: none.",
            metavar="FILE",
        ),
    ] = ""
    served_model_names: Annotated[
        tuple[str, ...],
        option(
            "Name of the base model for HTTP clients, or several; the first is in answers. "
            "Default: the name of the model's directory.",
            metavar="NAME",
            is_common=True,
        ),
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...],
        option(
            'Adapter to load at the start: NAME=PATH, or JSON with "name" and "path"; or several. '
            "Default: none.",
            flag="--lora-modules",
            metavar="NAME=PATH",
        ),
    ] = ()
    allow_runtime_lora_updating: Annotated[
        bool,
        option(
            "Let HTTP clients load, unload, hold and evict adapters. The variable "
            f"{UPDATING_VARIABLE} allows it too.",
            is_common=True,
        ),
    ] = False
    lora_resolver_roots: Annotated[
        tuple[str, ...],
        option(
            "Directory in which an unknown model name is looked up as an adapter's directory; "
            "repeat for several. Default: none.",
            metavar="DIRECTORY",
        ),
    ] = ()
    lora_resolvers: Annotated[
        tuple[str, ...],
        option(
            "Installed plugin (entry point of loradock.lora_resolvers) that finds the directory "
            "of an unknown model name; repeat for several. Default: none.",
            metavar="NAME",
        ),
    ] = ()
    chat_template: Annotated[
        str,
        option("File with a chat template. Default: the model's own.", metavar="FILE"),
    ] = ""
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder"],
        option(
            "Format in which the model writes calls of tools: hermes, llama3_json, mistral or "
            "qwen3_coder. Default: auto, the one that the chat template shows.",
            metavar="NAME",
        ),
    ] = AUTO_PARSER
    allowed_media_domains: Annotated[
        tuple[str, ...],
        option(
            "Host from which images can be fetched; repeat for several. Default: none, so that "
            "images are data URLs.",
            metavar="HOST",
        ),
    ] = ()
    body_bytes_max: Annotated[
        int,
        option("Largest body of an HTTP request; a larger one is refused.", ge=1, unit="bytes"),
    ] = 64 << 20
    header_bytes_max: Annotated[
        int,
        option("Largest head of an HTTP request; a larger one is refused.", ge=1, unit="bytes"),
    ] = 64 << 10
    connections_max: Annotated[
        int,
        option(
            "Largest number of HTTP connections. Beyond it, one that waits for its next request "
            "is closed for a new one, or the new one is refused.",
            flag="--http-connections",
            ge=1,
        ),
    ] = 4096
    receive_timeout_s: Annotated[
        int,
        option("Time within which a request has to arrive.", ge=1, unit="seconds"),
    ] = 60
    http_timeout_s: Annotated[
        int,
        option("Time limit of an inference request.", ge=1, le=3600, unit="seconds"),
    ] = 600
    drain_timeout_s: Annotated[
        int,
        option(
            "How long requests can take to end at a stop; `serve` waits 10 s for its gateway.",
            ge=0,
            unit="seconds",
        ),
    ] = 8
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        option("Serve GET /tokenizer_info: the settings of the tokenizer, and the chat template."),
    ] = False
    disable_vllm_metrics: Annotated[bool, option("Leave out metrics under the names of vLLM.")] = (
        False
    )
    metrics_adapters_max: Annotated[
        int,
        option('Largest number of adapters with separate metrics; the rest are "other".', ge=0),
    ] = 100


class GatewayStart(Struct, frozen=True, kw_only=True):
    """The options of a gateway that is started by itself; `serve` has them from its own."""

    PANEL: ClassVar = "Gateway process"

    http: Annotated[
        str,
        option(
            "Address to serve at. Port 0 selects a free one.",
            metavar="HOST:PORT",
            is_common=True,
        ),
    ] = f"{HOST_DEFAULT}:{PORT_DEFAULT}"
    model: Annotated[
        str,
        option(
            "Directory of the base model, for its tokenizer and chat template. Default: none, so "
            "that chats and texts of tokens are not served.",
            metavar="DIRECTORY",
            is_common=True,
        ),
    ] = ""
    adapter_roots: Annotated[
        tuple[str, ...],
        option(
            "Directory of the server's adapters, to read the chat templates and generation "
            "defaults that are saved beside them; repeat for several. Default: none, so that the "
            "model's are used for all.",
            metavar="DIRECTORY",
            is_common=True,
        ),
    ] = ()
    max_model_len: Annotated[
        int,
        option(
            "Largest number of tokens of prompt and output together; 0 for the limit in the "
            "model's config.json.",
            ge=0,
            is_common=True,
        ),
    ] = 0


class GatewayConfig(GatewayOptions, frozen=True, kw_only=True):
    """Configuration of a gateway process.

    `directory`: the controller's; or `address`, `key` and `server_key` for one that is reached over
    a network. `model`: the base model's directory, for tokenizer and template; without it chats are
    not served. `fleet`: the file of the fleet whose adapters are found; empty outside a fleet.
    `fleet_key`: accepted like an API key, if requests need one.

    `adapter_roots`: the directories below which adapters are, as this machine sees
    them; without one, their chat templates and generation defaults are not read. `parent_fd` closes
    when the supervisor ends, and `progress` is the memory in which steps are reported to it; -1 and
    empty without a supervisor.
    """

    directory: str = ""
    address: str = ""
    key: str = ""
    server_key: str = ""
    log_format: LogFormat = "console"
    host: str = HOST_DEFAULT
    port: int = PORT_DEFAULT
    model: str = ""
    adapter_roots: tuple[str, ...] = ()
    max_model_len: int = 0
    fleet: str = ""
    fleet_key: str = ""
    parent_fd: int = -1
    progress: str = ""


def allows_updating(config: GatewayConfig, environment: Mapping[str, str]) -> bool:
    """Return whether clients can change adapters."""
    variable = environment.get(UPDATING_VARIABLE, "").strip().lower()
    return config.allow_runtime_lora_updating or variable in _TRUE
