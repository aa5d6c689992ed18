"""The process that renders chat templates of adapters, within bounds on time and memory.

An adapter's template is a program from whoever may load adapters. Jinja's sandbox keeps it from
Python's objects, but two nested loops or one multiplication take any time or memory, and nothing
inside a process can end them. So they run in a process that the system ends.

A frame is its length in four bytes and JSON. A request is `{"source", "special_tokens"}`, with
`messages` and `variables` if it is to be rendered; the answer is `{"reads_parts"}`, `{"text"}`, or
`{"error"}`. A request that exceeds a bound has no answer.
"""

import json
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import Any, BinaryIO, Final

from loradock.gateway.inference.chat_template import ChatTemplate, TemplateError

CPU_S: Final = 2.0
"""The processor time of one request; other processes on the machine don't count."""
MEMORY_BYTES: Final = 512 << 20
"""The address space of the process."""

_LENGTH: Final = struct.Struct("<I")
_TEMPLATES_MAX: Final = 32


def encode_frame(content: dict[str, Any]) -> bytes:
    """Return the frame of a request or an answer."""
    data = json.dumps(content).encode()
    return _LENGTH.pack(len(data)) + data


def content_length(head: bytes) -> int:
    """Return the number of bytes that follow the first `HEAD_BYTES` of a frame."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


HEAD_BYTES: Final = _LENGTH.size


def main() -> int:
    """Answer requests on stdin until it is closed; return the exit status."""
    # Ctrl-C is for the gateway, whose end closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while (request := _read(source)) is not None:
        # SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = encode_frame(_answer(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(answer)
        target.flush()
    return 0


def _read(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    content: dict[str, Any] = json.loads(source.read(content_length(head)))
    return content


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = _compiled(request["source"], tuple(sorted(request["special_tokens"].items())))
        if "messages" not in request:
            return {"reads_parts": template.reads_parts}
        return {"text": template.render(request["messages"], request["variables"])}
    except (TemplateError, ValueError) as error:
        return {"error": str(error)}
    except MemoryError:
        # What other templates hold may be what is missing, so the next request has a new process.
        sys.exit(1)


@lru_cache(maxsize=_TEMPLATES_MAX)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))
