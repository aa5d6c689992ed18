"""Payloads of unanswered requests: prompts, and inputs of embeddings and classifications.

They leave this module only for the engine, are never logged, and are dropped with the answer.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from loradock.messages import requests
from loradock.messages.commands import StartGeneration, StartInference, StartPooling
from loradock.messages.ids import RequestId
from loradock.messages.wire import REQUESTS, Body

PAYLOAD_BYTES_MAX: Final = 1 << 30
"""Bound on the payloads of unanswered requests, in bytes together.

Payloads of requests that are pending already, which clients resend after a restart, may take the
same number of bytes again.
"""


class Payloads:
    """Encoded requests: decoded, a prompt of token ids takes many times the memory."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, bytes] = {}
        # Whether a request's payload is kept. The dict's own method: every answer calls it.
        self.has: Final[Callable[[RequestId], bool]] = self._by_id.__contains__
        self.size_bytes = 0

    def store(self, request_id: RequestId, body: Body, is_pending: bool) -> bool:
        """Keep a request's payload unless it is kept already; False if the bound is reached.

        A pending request without its payload then ends as if that were lost.
        """
        if request_id in self._by_id:
            return True
        if self.size_bytes + memoryview(body).nbytes > PAYLOAD_BYTES_MAX * (1 + is_pending):
            return is_pending
        # A copy: the frame has other requests too.
        self._by_id[request_id] = stored = bytes(body)
        self.size_bytes += len(stored)
        return True

    def drop(self, request_id: RequestId) -> None:
        """Drop a request's payload, if there is one."""
        self.size_bytes -= len(self._by_id.pop(request_id, b""))

    def complete(self, command: StartInference) -> StartInference | None:
        """Return the command with its payload; None where an earlier process had the payload."""
        body = self._by_id.get(command.request_id)
        match None if body is None else REQUESTS.decode_body(body), command:
            case requests.Generate() as request, StartGeneration():
                return msgspec.structs.replace(
                    command,
                    prompt=request.prompt,
                    sampling=request.sampling,
                    priority=request.priority,
                    trace=request.trace,
                )
            case (requests.Embed() | requests.Classify()) as request, StartPooling():
                return msgspec.structs.replace(
                    command,
                    inputs=request.inputs,
                    trace=request.trace,
                    truncation=request.truncation,
                    dimensions=request.dimensions if isinstance(request, requests.Embed) else 0,
                )
        return None
