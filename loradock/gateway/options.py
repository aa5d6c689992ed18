"""The options of a gateway process, defined once.

`loradock gateway` and `loradock serve` make their options from `GatewayOptions`, and the process
receives `GatewayConfig` as JSON.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

PORT_DEFAULT: Final = 8000
HOST_DEFAULT: Final = "127.0.0.1"

UPDATING_VARIABLE: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""The environment variable that allows adapters to be changed over HTTP, as in vLLM."""

AUTO_PARSER: Final = "auto"
"""Stands for the format of tool calls that the chat template shows."""

KEYS_VARIABLES: Final = ("LORADOCK_API_KEY", "VLLM_API_KEY")
"""Environment variables that may contain an API key."""


def _option(
    flag: str,
    text: str,
    metavar: str | None = None,
    least: int | None = None,
    most: int | None = None,
) -> Any:
    return Meta(description=text, extra={"flag": flag, "metavar": metavar}, ge=least, le=most)


class GatewayOptions(Struct, frozen=True, kw_only=True):
    """The options that both commands have; sizes in bytes, durations in seconds."""

    api_keys: Annotated[
        tuple[str, ...],
        _option(
            "--api-key",
            "Key that requests have to send as `Authorization: Bearer KEY`; repeat for several. "
            "Default: the variables LORADOCK_API_KEY and VLLM_API_KEY.",
            "KEY",
        ),
    ] = ()
    api_key_file: Annotated[
        str, _option("--api-key-file", "File with one API key per line.", "FILE")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        _option(
            "--allowed-host",
            "Name under which requests may address the gateway; repeat for several, * for any. "
            "Default: any with an API key, HTTPS or a network's address; otherwise localhost, "
            "127.0.0.1, ::1 and the address of --http, so that no web page can reach it.",
            "HOST",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        _option(
            "--allowed-origins",
            "Web site whose pages may read answers in a browser (CORS), as https://example.org; "
            "several, a JSON list, or * for any. Default: none.",
            "ORIGIN",
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...],
        _option(
            "--allowed-methods",
            "Method that pages of --allowed-origins may use; several, or a JSON list. Default: "
            "all.",
            "METHOD",
        ),
    ] = ()
    allowed_headers: Annotated[
        tuple[str, ...],
        _option(
            "--allowed-headers",
            "Header that pages of --allowed-origins may send; several, or a JSON list. Default: "
            "all.",
            "HEADER",
        ),
    ] = ()
    allow_credentials: Annotated[
        bool,
        _option(
            "--allow-credentials",
            "Let pages of --allowed-origins send cookies and certificates of their users.",
        ),
    ] = False
    root_path: Annotated[
        str,
        _option(
            "--root-path",
            "Prefix of all paths at a proxy in front of the gateway, as /llm; requests may have it "
            "or not.",
            "PATH",
        ),
    ] = ""
    ssl_keyfile: Annotated[str, _option("--ssl-keyfile", "Private key for HTTPS.", "FILE")] = ""
    ssl_certfile: Annotated[str, _option("--ssl-certfile", "Certificate for HTTPS.", "FILE")] = ""
    ssl_ca_certs: Annotated[
        str,
        _option(
            "--ssl-ca-certs",
            "Certificates of authorities; clients need a certificate that one of them signed.",
            "FILE",
        ),
    ] = ""
    served_model_names: Annotated[
        tuple[str, ...],
        _option(
            "--served-model-name",
            "Name of the base model for HTTP clients, or several; the first is in answers. "
            "Default: the name of the model's directory.",
            "NAME",
        ),
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...],
        _option(
            "--lora-modules",
            'Adapter to load at the start: NAME=PATH, or JSON with "name" and "path"; or several.',
            "NAME=PATH",
        ),
    ] = ()
    allow_runtime_lora_updating: Annotated[
        bool,
        _option(
            "--allow-runtime-lora-updating",
            "Let HTTP clients load, unload, hold and evict adapters. The variable "
            f"{UPDATING_VARIABLE} allows it too.",
        ),
    ] = False
    lora_resolver_roots: Annotated[
        tuple[str, ...],
        _option(
            "--lora-resolver-root",
            "Directory in which an unknown model name is looked up as an adapter's directory; "
            "repeat for several.",
            "DIRECTORY",
        ),
    ] = ()
    lora_resolvers: Annotated[
        tuple[str, ...],
        _option(
            "--lora-resolver",
            "Installed plugin (entry point of loradock.lora_resolvers) that finds the directory of "
            "an unknown model name; repeat for several.",
            "NAME",
        ),
    ] = ()
    chat_template: Annotated[
        str,
        _option("--chat-template", "File with a chat template instead of the model's own.", "FILE"),
    ] = ""
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder"],
        _option(
            "--tool-call-parser",
            "Format in which the model writes calls of tools: hermes, llama3_json, mistral or "
            "qwen3_coder. Default: auto, the one that the chat template shows.",
            "NAME",
        ),
    ] = AUTO_PARSER
    allowed_media_domains: Annotated[
        tuple[str, ...],
        _option(
            "--allowed-media-domain",
            "Host from which images may be fetched; repeat for several. Default: none, so that "
            "images are data URLs.",
            "HOST",
        ),
    ] = ()
    max_model_len: Annotated[
        int,
        _option(
            "--max-model-len",
            "Largest number of tokens of prompt and output together; 0 for the limit in the "
            "model's config.json.",
            "NUMBER",
            0,
        ),
    ] = 0
    body_bytes_max: Annotated[
        int,
        _option(
            "--body-bytes", "Largest body of an HTTP request; a larger one is refused.", "BYTES", 1
        ),
    ] = 64 << 20
    header_bytes_max: Annotated[
        int,
        _option(
            "--header-bytes",
            "Largest head of an HTTP request; a larger one is refused.",
            "BYTES",
            1,
        ),
    ] = 64 << 10
    receive_timeout_s: Annotated[
        int,
        _option("--receive-timeout", "Time within which a request has to arrive.", "SECONDS", 1),
    ] = 60
    request_timeout_s: Annotated[
        int, _option("--http-timeout", "Time limit of an inference request.", "SECONDS", 1, 3600)
    ] = 600
    drain_timeout_s: Annotated[
        int,
        _option(
            "--drain-timeout",
            "How long requests may take to end at a stop; `serve` waits 10 s for its gateway.",
            "SECONDS",
            0,
        ),
    ] = 8
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        _option(
            "--enable-tokenizer-info-endpoint",
            "Serve GET /tokenizer_info: the settings of the tokenizer, and the chat template.",
        ),
    ] = False
    disable_vllm_metrics: Annotated[
        bool, _option("--disable-vllm-metrics", "Leave out metrics under the names of vLLM.")
    ] = False
    metrics_adapters_max: Annotated[
        int,
        _option(
            "--metrics-adapters",
            'Largest number of adapters with metrics of their own; the rest are "other".',
            "NUMBER",
            0,
        ),
    ] = 100


class GatewayConfig(GatewayOptions, frozen=True, kw_only=True):
    """Configuration of a gateway process.

    `directory`: the controller's; or `address`, `key` and `server_key` for one that is reached over
    a network. `model`: the base model's directory, for tokenizer and template; without it chats are
    not served. `adapter_roots`: the directories below which adapters are, as this machine sees
    them; without one, their chat templates and generation defaults are not read.
    """

    directory: str = ""
    address: str = ""
    key: str = ""
    server_key: str = ""
    log_format: Literal["console", "json"] = "console"
    host: str = HOST_DEFAULT
    port: int = PORT_DEFAULT
    model: str = ""
    adapter_roots: tuple[str, ...] = ()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[IPV6]:PORT` or `PORT`; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not an address; HOST:PORT is needed, like 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]") or HOST_DEFAULT, int(port)
