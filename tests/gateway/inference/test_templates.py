"""The process that renders adapters' templates: whose turn it is, and its end."""

import asyncio
import json
from typing import Any

import pytest

from loradock.gateway.http.endpoint import CLIENT
from loradock.gateway.inference.chat_template import TemplateError
from loradock.gateway.inference.templates import AdaptersTemplate, TemplateProcess
from loradock.gateway.inference.workers import Workers
from tests.support.waiting import HANG_S


def test_clients_and_compilations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a compilation can be another client than the one that began it."""
    rendered: list[str] = []
    may_end = asyncio.Event()

    async def exchange(_: TemplateProcess, line: bytes) -> bytes:
        await may_end.wait()
        rendered.append(json.loads(line)["source"])
        return b'{"reads_parts": false}\n'

    async def scenario() -> None:
        process = TemplateProcess()
        CLIENT.set("many")
        many = [process.ask(b'{"source": "many"}\n', "many") for _ in range(20)]
        first = asyncio.gather(*many)
        await asyncio.sleep(0)
        others = asyncio.gather(
            process.compile("compiled", {}), process.ask(b'{"source": "one"}\n', "one")
        )
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(first, others)

    monkeypatch.setattr(TemplateProcess, "_exchange", exchange)
    asyncio.run(scenario())
    assert sorted(rendered[1:4]) == ["compiled", "many", "one"]


def test_variables_that_are_nested_too_deeply_are_refused() -> None:
    tools: list[Any] = []
    for _ in range(5000):
        tools = [tools]
    template = AdaptersTemplate(TemplateProcess(), "", {}, reads_parts=False)
    with pytest.raises(TemplateError, match="nested too deeply"):
        asyncio.run(template.render([], {"tools": tools}, 0, Workers()))


def test_the_process_ends_without_what_it_renders_or_is_asked_for() -> None:
    endless = "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2
    chat = {"source": endless, "special_tokens": {}, "messages": [], "variables": {}}

    async def scenario() -> None:
        process = TemplateProcess()
        line = json.dumps(chat).encode() + b"\n"
        asked = [asyncio.create_task(process.ask(line, "a")) for _ in range(1000)]
        # The process has been started.
        await process.compile("", {})
        await process.close()
        ends = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), HANG_S)
        assert asyncio.CancelledError in map(type, ends)
        assert isinstance(ends[-1], TemplateError)
        assert "the gateway ends" in str(ends[-1])

    asyncio.run(scenario())
