"""A gateway in a thread of the test, in front of a stand-in for the controller."""

import asyncio
import json
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loradock.gateway.address import open_listener
from loradock.gateway.options import GatewayConfig
from loradock.gateway.server.process import serve
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.processes.progress import Progress
from tests.support.parallel.processes import TINY
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import HANG_S, wait_until

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<{{ message.role }}>
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if tools -%}<tools>{{ tools | tojson }}{%- endif -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""

HERMES_TEMPLATE = """\
{%- if tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}
{%- for message in messages -%}
<{{ message.role }}>{{ message.content or "" }}
{%- for call in message.tool_calls or () -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""


class Served:
    """A running gateway: its address, an HTTP client of it, and the stand-in."""

    def __init__(self, controller: StandIn, port: int, verify: ssl.SSLContext | None) -> None:
        self.controller = controller
        self.port = port
        self.url = f"{'https' if verify else 'http'}://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=HANG_S, verify=verify or True)

    def post(self, path: Any, body: Any = None, **headers: Any) -> Any:
        return self.http.post(path, json={} if body is None else body, headers=headers)

    def refused(self, path: str, body: Any = None, status: int = 400) -> Any:
        """Send a request that is refused with this status, and return its error."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def get(self, path: Any, **headers: Any) -> Any:
        return self.http.get(path, headers=headers)

    def events(self, path: Any, body: Any) -> Any:
        """Return the data of each event of a stream."""
        with self.http.stream("POST", path, json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream"), response.read()
            text = "".join(response.iter_text())
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line]

    def raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own, and return all that is received."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_all(connection)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def post_bytes(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """Return a request that closes its connection."""
    size = len(body) if length is None else length
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        "content-type: application/json",
        f"content-length: {size}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def serve_gateway(
    controller: StandIn,
    verify: ssl.SSLContext | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve until the context ends, which also shows that the gateway ends with its supervisor."""
    parent_fd, write_fd = os.pipe()
    directory = str(controller.directory)
    config = GatewayConfig(directory=directory, port=0, parent_fd=parent_fd, **options)
    listener = open_listener(config.host, config.port)
    serving = partial(serve, config, listener, progress)
    thread = threading.Thread(target=lambda: asyncio.run(serving()))
    thread.start()
    served = Served(controller, listener.getsockname()[1], verify)
    try:
        wait_until(lambda: "loradock_synced 1.0" in served.get("/metrics").text)
        yield served
    finally:
        served.http.close()
        os.close(write_fd)
        thread.join(HANG_S)
        listener.close()
    assert not thread.is_alive()


def model_directory(parent: Path, template: str | None = CHAT_TEMPLATE) -> Path:
    """Return a copy of the tiny model's files without weights, with a chat template."""
    directory = parent / "tiny-chat"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "model" / name, directory / name)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


class Adapters:
    """Answers of a stand-in that loads, holds and removes adapters."""

    def __init__(self, controller: StandIn) -> None:
        self.controller = controller
        controller.answers[rq.LoadAdapter] = self.load
        controller.answers[rq.HoldAdapter] = self.hold
        controller.answers[rq.RemoveAdapter] = self.remove

    def load(self, request: Any) -> Any:
        if "missing" in request.path:
            text = f"adapter {request.adapter!r}: no directory {request.path!r}"
            return rq.Refused(request.request_id, ErrorCode.NOT_FOUND, text)
        self.controller.adapters[request.adapter] = view(
            request.adapter, "cpu-cached", path=request.path
        )
        return self._done(request)

    def hold(self, request: Any) -> Any:
        known = self.controller.adapters[request.adapter]
        self.controller.adapters[request.adapter] = msgspec.structs.replace(known, held=True)
        return self._done(request)

    def remove(self, request: Any) -> Any:
        done = self._done(request)
        del self.controller.adapters[request.adapter]
        return done

    def _done(self, request: Any) -> Any:
        known = self.controller.adapters[request.adapter]
        return rq.AdapterDone(request.request_id, request.adapter, known.state)


def data_of(events: Any) -> Any:
    """Return the decoded events of a stream, without its end."""
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
