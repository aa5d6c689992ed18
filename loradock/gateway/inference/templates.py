"""The chat templates of a model or an adapter, and the process that renders them.

The templates of the model and of `--chat-template` are the operator's, and rendered in the gateway.
An adapter's are rendered in another process (`chat_template.main`), which the system ends if a
template takes too long.
"""

import asyncio
import json
import signal
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog
from msgspec import Struct

from loradock.gateway.http.endpoint import CLIENT
from loradock.gateway.http.errors import prompt_too_long
from loradock.gateway.inference.chat_template import (
    CPU_S,
    MEMORY_BYTES,
    ChatTemplate,
    TemplateError,
)
from loradock.gateway.inference.tool_formats import find_format
from loradock.gateway.inference.turns import Turns
from loradock.gateway.inference.workers import Workers
from loradock.messages.prompts import PROMPT_CHARACTERS_MAX
from loradock.processes.subprocesses import process_command

WALL_S: Final = 60.0
"""Bound on the time of an answer of the process, on a machine that hardly runs it."""
END_S: Final = 1.0
"""Bound on the time in which the process ends by itself."""
RETRY_BACKOFF_S: Final = 60.0
"""Time in which a template is refused after it exceeded its bounds: it would cost as much again."""

_ATTEMPTS: Final = 2
_COMPILES: Final = "compiles"
"""In place of a client's name: every client can wait for the same compilation."""
_BOUNDS: Final = f"{CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB"

log = structlog.get_logger("gateway")


class Template(ABC):
    """A template; `reads_parts`: it reads contents as lists of parts, otherwise as texts.

    `tool_format`: the format of tool calls that it shows; empty if it shows no known one.
    """

    def __init__(self, source: str, *, reads_parts: bool) -> None:
        self.reads_parts: Final = reads_parts
        self.tool_format: Final = find_format(source)

    @abstractmethod
    async def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any], size: int, workers: Workers
    ) -> str:
        """Return the prompt of messages of this size; raises `TemplateError`."""


class Templates(Struct, frozen=True):
    """The templates of one tokenizer; `tool_use`, if there is one, is for chats with tools.

    `problem`: why there is none although one was saved.
    """

    default: Template | None = None
    tool_use: Template | None = None
    problem: str = ""

    def template_for(self, *, has_tools: bool) -> Template | None:
        """Return the template for a chat with or without tools."""
        return self.tool_use if has_tools and self.tool_use is not None else self.default


class OperatorsTemplate(Template):
    """A template that the operator chose; raises `ValueError` for one with wrong syntax."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = ChatTemplate(source, special_tokens)
        super().__init__(source, reads_parts=self._template.reads_parts)

    async def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any], size: int, workers: Workers
    ) -> str:
        """Return the prompt of messages of this size; raises `TemplateError`."""
        return await workers.run(size, partial(self._template.render, messages, variables))


class AdaptersTemplate(Template):
    """An adapter's template, rendered in a `TemplateProcess`, which makes it."""

    def __init__(
        self,
        process: "TemplateProcess",
        source: str,
        special_tokens: Mapping[str, str],
        *,
        reads_parts: bool,
    ) -> None:
        super().__init__(source, reads_parts=reads_parts)
        self._process = process
        self._template: Final = {"source": source, "special_tokens": dict(special_tokens)}
        self._refuses_until = 0.0

    async def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any], size: int, workers: Workers
    ) -> str:
        """Return the prompt; raises `TemplateError`, also for a time after a bound was exceeded.

        Raises `HttpError` for one that is too long.
        """
        clock = asyncio.get_running_loop().time
        if clock() < self._refuses_until:
            raise TemplateError(f"the chat template needed more than {_BOUNDS} a moment ago")
        request = {**self._template, "messages": list(messages), "variables": dict(variables)}
        line = await workers.run(size, partial(_line, request))
        try:
            answered = await self._process.ask(line, CLIENT.get())
        except BoundsExceeded:
            self._refuses_until = clock() + RETRY_BACKOFF_S
            raise
        answer = await workers.run(len(answered), partial(_answer, answered))
        if "characters" in answer:
            found = f"{answer['characters']} characters > {PROMPT_CHARACTERS_MAX} maximum"
            raise prompt_too_long(found, None, "messages")
        return str(answer["text"])


class BoundsExceeded(TemplateError):  # noqa: N818 - named by what happened
    """A template that needs more time or memory than it can have."""

    def __init__(self) -> None:
        super().__init__(f"the chat template needs more than {_BOUNDS} for these messages")


class TemplateProcess:
    """The process for adapters' templates, started by the first of them; one at a time is rendered.

    HTTP clients take turns. It belongs to one event loop.
    """

    def __init__(self) -> None:
        self._turns = Turns(1)
        self._process: Process | None = None
        self._asked: asyncio.Task[bytes] | None = None
        self._is_closed = False

    async def compile(self, source: str, special_tokens: Mapping[str, str]) -> AdaptersTemplate:
        """Return the template; raises `ValueError` for one that can't be compiled."""
        request = {"source": source, "special_tokens": dict(special_tokens)}
        try:
            answer = _answer(await self.ask(_line(request), _COMPILES))
        except TemplateError as error:
            raise ValueError(str(error)) from error
        return AdaptersTemplate(self, source, special_tokens, reads_parts=answer["reads_parts"])

    async def ask(self, line: bytes, client: str) -> bytes:
        """Return the line that answers a request, in the client's turn; raises `TemplateError`."""
        await self._turns.begin(client)

        def on_done(task: asyncio.Task[bytes]) -> None:
            self._turns.end(client)
            if not task.cancelled():
                task.exception()

        # An exchange that its client abandons is completed: the next answer would be its own.
        self._asked = asyncio.create_task(self._ask(line))
        self._asked.add_done_callback(on_done)
        return await asyncio.shield(self._asked)

    async def close(self) -> None:
        """End the process, also amid an exchange, and start none again."""
        self._is_closed = True
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
        await self._end()

    async def _ask(self, line: bytes) -> bytes:
        if self._is_closed:
            raise TemplateError("the gateway ends, and renders no chat template any more")
        for _ in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(WALL_S):
                    return await self._exchange(line)
            except (ConnectionError, TimeoutError):
                if await self._end() == -signal.SIGPROF:
                    break
                # It ended for lack of memory, of which earlier templates may have left little, or
                # was ended by someone else: a new process decides.
        log.warning("an adapter's chat template exceeded its bounds", bounds=_BOUNDS)
        raise BoundsExceeded

    async def _exchange(self, line: bytes) -> bytes:
        if self._process is None:
            # No answer is longer than the memory of the process.
            self._process = await asyncio.create_subprocess_exec(
                *process_command("templates"), stdin=PIPE, stdout=PIPE, limit=MEMORY_BYTES
            )
        source, target = self._process.stdout, self._process.stdin
        if source is None or target is None:
            raise ConnectionError("the process has no pipes")
        target.write(line)
        await target.drain()
        answered = await source.readline()
        if not answered.endswith(b"\n"):
            raise ConnectionError("the process ended without an answer")
        return answered

    async def _end(self) -> int | None:
        """End the process, or wait for its end; return its status, None if there is none."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()


def _line(request: dict[str, Any]) -> bytes:
    """Return a request to the process; raises `TemplateError`."""
    try:
        return json.dumps(request).encode() + b"\n"
    except RecursionError as error:
        raise TemplateError(f"the template's variables are nested too deeply: {error}") from error


def _answer(line: bytes) -> dict[str, Any]:
    """Return an answer of the process; raises `TemplateError` for an error."""
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise TemplateError(answer["error"])
    return answer
