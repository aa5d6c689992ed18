"""The words of other programs: what people who know vLLM, Ollama, Redis, NATS or kubectl type.

A word that means the same here works. Another is answered with the command to use.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from loradock.cli.exit_codes import CommandError, ExitCode

SAME: Final[Mapping[str, str]] = {
    "ls": "list",
    "ps": "list",
    "describe": "show",
    "inspect": "show",
    "delete": "remove",
    "rm": "remove",
    "unregister": "remove",
    "add": "load",
    "register": "load",
    "pull": "load",
    "pin": "hold",
    "unpin": "release",
    "complete": "generate",
    "prompt": "generate",
    "monitor": "events",
    "watch": "events",
    "sub": "events",
    "start": "serve",
    "up": "serve",
    "server": "serve",
    "shutdown": "stop",
    "down": "stop",
    "drain": "stop",
    "info": "status",
    "benchmark": "bench",
    "ctx": "context",
    "wait": "ready",
}
"""Another program's word for a command -> the command."""

ANSWERS: Final[Mapping[str, str]] = {
    "unload": "`loradock evict ADAPTER` drops its weights and keeps its name, `loradock remove "
    "ADAPTER` forgets it as well",
    "run": "`loradock chat --adapter ADAPTER` talks to a model that is served, `loradock generate` "
    "continues one prompt, and `loradock serve --model DIRECTORY` starts a server",
    "logs": "the processes log to the stderr of `loradock serve`; `loradock events` prints what "
    "happens to adapters, and `loradock log` works on the files of a server",
    "restart": "`loradock engine restart` starts the engine again; for the whole server, "
    "`loradock stop` and `loradock serve`",
    "kill": "`loradock cancel REQUEST` ends a generation, `loradock stop` the server",
    "get": "`loradock list` shows all adapters, `loradock show ADAPTER` one of them",
    "models": "`loradock status` shows the base model, `loradock list` its adapters",
    "create": "`loradock load ADAPTER --path DIRECTORY` adds an adapter that is trained already",
    "push": "adapters are directories below --adapter-root of the server: copy yours there, then "
    "`loradock load`",
    "collect-env": "`loradock --version` and `loradock status` show versions, device and model",
    "run-batch": "`loradock bench` measures many requests; a program sends its own with "
    "`loradock.AsyncClient`",
    "health": "`loradock ready --timeout 0` checks once that the server can serve",
    "version": "`loradock --version` prints it, `loradock status` the server's",
    "metrics": "`loradock serve --http HOST:PORT` has them at /metrics; `loradock top` shows the "
    "most important",
    "ping": "`loradock ready --timeout 0` checks once that the server can serve",
    "swap": "`loradock load ADAPTER --path DIRECTORY --replace` replaces the content of a name",
}
"""A word that is no command -> what to use."""

SERVE_TRUE: Final = frozenset({"--enable-lora"})
"""Switches of another program's `serve` that are always on here."""

SERVE_ANSWERS: Final[Mapping[str, str]] = {
    "--gpu-memory-utilization": "name --device-bytes for adapters and --kv-cache-bytes for keys "
    "and values",
    "--swap-space": "host memory for adapters is --host-bytes and --pinned-bytes",
    "--download-dir": "nothing is downloaded; --model is a directory of this machine",
    "--tokenizer": "the tokenizer is read from the directory of --model",
    "--trust-remote-code": "no code of a model's directory is run",
    "--pipeline-parallel-size": "a model is divided by --tensor-parallel-size only",
    "--data-parallel-size": "start a server for each copy of the model",
    "--enforce-eager": "steps are captured with --capture-steps only",
    "--enable-prefix-caching": "prompts share what they have in common wherever the model allows "
    "it; leave it out",
    "--daemon": "a service manager runs it in the background: deploy/systemd",
    "--detach": "a service manager runs it in the background: deploy/systemd",
}
"""An option of another program's `serve` -> what to use."""

_ADDRESS_DEFAULTS: Final = {"--host": "127.0.0.1", "--port": "8000"}


def command_for(word: str) -> str:
    """Return the command that a word stands for; the word itself if it is no other program's."""
    return SAME.get(word, word)


def for_serve(words: Sequence[str], switches: frozenset[str] = frozenset()) -> list[str]:
    """Return the arguments of `serve` for `MODEL --host HOST --port PORT` and others of vLLM.

    `switches`: the options without a value. Raises `CommandError` for an option that has another
    name here.
    """
    found, address = list[str](), dict[str, str]()
    rest = iter(words)
    before = ""
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in _ADDRESS_DEFAULTS:
            address[flag] = value if equals else next(rest, "")
            before = ""
            continue
        if flag in SERVE_ANSWERS:
            raise CommandError(ExitCode.USAGE, f"serve has no option {flag}", SERVE_ANSWERS[flag])
        if not word.startswith("-") and (not before or before in switches | SERVE_TRUE):
            found += ["--model", word]
        elif word not in SERVE_TRUE:
            found.append(word)
        before = word
    if not address:
        return found
    if any(word.partition("=")[0] == "--http" for word in found):
        raise CommandError(
            ExitCode.USAGE, "--http names host and port; leave out --host and --port"
        )
    host, port = ({**_ADDRESS_DEFAULTS, **address}[flag] for flag in ("--host", "--port"))
    return [*found, "--http", f"{host}:{port}"]
