"""`loradock serve --http` with the tiny model, used through the `openai` client."""

import asyncio
import contextlib
import os
import random
import signal
import sys

import httpx
import openai
import pytest

from examples.transformations import TRANSFORMATIONS
from loradock.client import Client
from tests.support.document_runs import run_program
from tests.support.engine.serve_process import (
    gateway_url,
    is_alive,
    serve,
    wait_for_end,
    wait_for_gateway,
)
from tests.support.gateway.browser import browser, visit
from tests.support.gateway.collector import collect
from tests.support.simulation.command_runs import start_command
from tests.support.sources import ROOT
from tests.support.spans import CALLER_ID, TRACE_ID, TRACEPARENT
from tests.support.waiting import HANG_S, wait_until

OPTIONS = ("--max-loras", "3", "--max-lora-rank", "64", "--http", "127.0.0.1:0")
KEY = "secret"
PROGRAM = ROOT / "tests/clients/programs/openai_text.py"


@pytest.fixture(scope="module")
def collector():
    """Receives the spans of the processes that the tests start."""
    with collect() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", running.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield running


@pytest.fixture(scope="module")
def running(tmp_path_factory, collector):
    """A server with a gateway; yields its directory and the address of its protocol."""
    directory = tmp_path_factory.mktemp("ld") / "d"
    template = directory.with_name("template.jinja")
    template.write_text("{{ messages[-1].content }}>")
    more = ("--allow-runtime-lora-updating", "--api-key", KEY, "--lora-modules", "rev=reverse")
    more += ("--lora-modules", "upper=upper", "--chat-template", str(template))
    with serve(directory, *OPTIONS, *more):
        yield directory, f"{wait_for_gateway(directory)}v1"


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=running[1], api_key=KEY, timeout=HANG_S, max_retries=0) as client:
        yield client


def module(name):
    """Return the body that loads an adapter, also if it is loaded."""
    return {"lora_name": name, "lora_path": name, "load_inplace": True}


def wait_for_adapter(client, name):
    wait_until(lambda: name in [model.id for model in client.models.list()])


def no_requests(directory):
    """Wait until the controller has no request, and no adapter is leased."""
    with Client(directory, timeout_s=HANG_S) as controller:
        wait_until(lambda: controller.status().requests == 0)
        wait_until(lambda: not any(view.leases for view in controller.list().adapters))


def test_the_openai_client(running, client):
    directory, url = running
    wait_for_adapter(client, "rev")
    run_program(sys.executable, str(PROGRAM), BASE_URL=url, API_KEY=KEY, MODEL="rev")
    # What was closed, cancelled or given up is not executed any more.
    no_requests(directory)


def test_a_trace_continues_into_the_engine(running, client, collector):
    wait_for_adapter(client, "rev")
    headers = {"traceparent": TRACEPARENT}
    client.completions.create(
        model="rev", prompt="abc>", max_tokens=8, temperature=0, extra_headers=headers
    )

    def of_trace(service, name):
        found = collector.of_service(service, name)
        return [span for span in found if span.trace_id.hex() == TRACE_ID]

    wait_until(lambda: of_trace("loradock-engine", "engine generate"), what="span of the engine")
    wait_until(lambda: of_trace("loradock-gateway", "text_completion rev"), what="span")
    [above] = of_trace("loradock-gateway", "text_completion rev")
    [below] = of_trace("loradock-engine", "engine generate")
    assert (above.parent_span_id.hex(), below.parent_span_id) == (CALLER_ID, above.span_id)
    attributes = {one.key for one in above.attributes}
    assert {"loradock.adapter.state", "loradock.adapter.wait_s"} <= attributes


def test_every_adapter_answers_as_trained_from_many_tasks(running):
    _, url = running
    words = ("hello", "adapter", "slots")

    async def main():
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, timeout=HANG_S) as client:

            async def load(name):
                return await client.post("/load_lora_adapter", body=module(name), cast_to=str)

            loaded = await asyncio.gather(*map(load, TRANSFORMATIONS))
            assert all(text.startswith("Success") for text in loaded)

            async def answer(name, word):
                answer = await client.completions.create(
                    model=name, prompt=f"{word}>", max_tokens=32, temperature=0
                )
                return answer.choices[0].text

            pairs = [(name, word) for name in TRANSFORMATIONS for word in words]
            found = await asyncio.gather(*(answer(*pair) for pair in pairs))
            expected = [TRANSFORMATIONS[name](word) for name, word in pairs]
            assert found == expected

    asyncio.run(main())


def test_a_context_that_is_too_long_is_refused(client):
    for body in ({"prompt": "x", "max_tokens": 10_000}, {"prompt": "x" * 512}):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
            client.completions.create(model="model", **body)
        assert (caught.value.code, caught.value.status_code) == ("context_length_exceeded", 400)
        assert "prompt is too long" in caught.value.message


def test_every_token_of_an_echo_has_an_entry_and_so_has_the_end(client):
    # lm-eval drops the last entry, which is the generated token's.
    answer = client.completions.create(
        model="upper",
        prompt="hello>HELLO",
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.token_logprobs) == len(choice.prompt_token_ids) + 1
    assert answer.usage.completion_tokens == len(choice.token_ids) == 1


def test_an_impossible_bias_is_refused(client):
    with pytest.raises(openai.BadRequestError, match=r"logit_bias must have tokens .* got 999999"):
        client.completions.create(model="model", prompt="x", logit_bias={"999999": 1})


async def read_until(http, body, events_max):
    """Read a stream up to a number of events, and leave; return what was read."""
    read = []
    async with http.stream("POST", "v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line:
                read.append(line)
            if len(read) >= events_max:
                break
    return read


def test_two_gateways_and_200_streams_of_which_many_are_left(running):
    directory, url = running
    second = start_command(
        *("gateway", "--http", "127.0.0.1:0", "--api-key", KEY), directory=directory
    )
    try:
        line = ""
        while "the gateway serves" not in line:
            line = second.stderr.readline()
        urls = (url.removesuffix("v1"), line.partition("url=")[2].strip())
        left_at = random.Random(5).choices((1, 2, 3, 5, 1000), k=200)

        async def main():
            headers = {"Authorization": f"Bearer {KEY}"}
            limits = httpx.Limits(max_connections=None)
            options = {"headers": headers, "timeout": HANG_S, "limits": limits}
            async with (
                httpx.AsyncClient(base_url=urls[0], **options) as first,
                httpx.AsyncClient(base_url=urls[1], **options) as other,
            ):
                body = {"prompt": "hello>", "max_tokens": 12, "stream": True, "temperature": 0}
                names = ("upper", "reverse", "model", "caesar")
                streams = [
                    read_until(
                        (first, other)[number % 2],
                        body | {"model": names[number % len(names)]},
                        events_max,
                    )
                    for number, events_max in enumerate(left_at)
                ]
                read = await asyncio.gather(*streams)
                for events, events_max in zip(read, left_at, strict=True):
                    assert len(events) == events_max or events[-1] == "data: [DONE]"
                for http in (first, other):
                    while (await http.get("load")).json() != {"server_load": 0}:
                        await asyncio.sleep(0.05)

        asyncio.run(main())
    finally:
        second.terminate()
        second.communicate()
    no_requests(directory)


def test_the_page_shows_adapters_moving_through_three_slots(running, client):
    """Each adapter is seen in a slot."""
    _, url = running
    wait_for_adapter(client, "rev")
    with browser() as one, visit(one, url.removesuffix("v1")) as visited:
        page = visited.page
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        visited.wait_for("document.getElementById('connection').textContent === 'connected'")
        for name in ("upper", "count", "spell", "caesar"):
            client.post("/load_lora_adapter", body=module(name), cast_to=str)
            client.completions.create(model=name, prompt="a>", max_tokens=4, temperature=0)
            slot = f"#tiles [data-id='{name}'][data-state='gpu-slot']"
            visited.wait_for(f'document.querySelector("{slot}")')
        # Three slots: the first one was needed again.
        full = "document.querySelectorAll(\"#tiles [data-state='gpu-slot']\").length === 3"
        visited.wait_for(full)
        visited.wait_for(
            "document.getElementById('log').textContent.includes('AdapterDeactivated')"
        )
        page.set_viewport_size({"width": 1200, "height": 1100})
        visited.keep_picture("page")
        # The first request for the events had no key.
        assert [text for text in visited.messages if "401" not in text] == []


STREAMED = {"model": "upper", "prompt": "a" * 40, "max_tokens": 150, "temperature": 0}


def text_of(chunks):
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_a_stream_survives_the_controller_and_fails_with_its_gateway(running, client):
    directory, _ = running
    log_file = directory.with_suffix(".log")
    wait_for_adapter(client, "upper")
    undisturbed = client.completions.create(**STREAMED)
    with Client(directory, timeout_s=HANG_S) as controller:
        pid = controller.status().controller_pid
        with client.completions.create(**STREAMED, stream=True) as stream:
            first = next(iter(stream))
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
            # All of it arrives, without a gap and without a repetition.
            assert text_of((first, *stream)) == undisturbed.choices[0].text
        wait_until(lambda: controller.status().controller_pid != pid)
    assert client.completions.create(**STREAMED).choices == undisturbed.choices
    lines = [line for line in log_file.read_text().splitlines() if "child=gateway" in line]
    pid = int(lines[-1].partition("pid=")[2])
    with client.completions.create(**STREAMED | {"max_tokens": 400}, stream=True) as stream:
        read = [next(iter(stream))]
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        # The client can't take what arrived for the whole, unless it was the whole.
        with contextlib.suppress(openai.APIConnectionError, httpx.TransportError):
            read += stream
            assert read[-1].choices[0].finish_reason == "length"
    no_requests(directory)
    wait_until(lambda: log_file.read_text().count("the gateway serves") == 2)
    # Port 0 selects another port after a restart.
    with openai.OpenAI(
        base_url=f"{gateway_url(directory)}v1", api_key=KEY, timeout=HANG_S
    ) as again:
        wait_for_adapter(again, "upper")
        assert again.completions.create(**STREAMED).choices == undisturbed.choices


def test_the_gateway_ends_with_its_server(tmp_path):
    directory = tmp_path / "d"
    log_file = directory.with_suffix(".log")
    with serve(directory, *OPTIONS, "--engine", "external"):
        wait_until(lambda: gateway_url(directory), lambda: log_file.stat().st_size)
        [line] = [line for line in log_file.read_text().splitlines() if "child=gateway" in line]
        pid = int(line.partition("pid=")[2])
        assert is_alive(pid)
    wait_for_end(pid)
