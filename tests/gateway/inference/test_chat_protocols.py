"""Laws of all protocols of chats: each asks the same of the engine, and tells the same answer."""

import json
from typing import Any

import pytest

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import MultimodalPrompt
from tests.support.gateway.chat_protocols import CALL, PROTOCOLS, SCHEMA, Ask, Asked, Protocol
from tests.support.gateway.outputs import (
    generate,
    only_generation,
    prompt,
    refuse,
    sampling,
    structure,
)
from tests.support.gateway.served import Served

WEATHER = ("weather", {"city": "Paris"})


@pytest.fixture(params=PROTOCOLS)
def protocol(request: Any) -> Protocol:
    return PROTOCOLS[request.param]


@pytest.fixture(params=["whole", "streamed"])
def ask(request: Any, protocol: Protocol) -> Ask:
    asking: Ask = getattr(protocol, request.param)
    return asking


def test_a_text(hermes: Served, ask: Ask) -> None:
    generate(hermes, "Hello.")
    told = ask(hermes, Asked(system="Be kind.", limit=9, temperature=0.5))
    assert told == ("Hello.", [], "stop", (4, 2))
    assert prompt(hermes) == "<system>Be kind.<user>hi<assistant>"
    assert (sampling(hermes).max_tokens, sampling(hermes).temperature) == (9, 0.5)


def test_a_text_and_calls(hermes: Served, ask: Ask) -> None:
    generate(hermes, f"I look.\n{CALL}\n{CALL}")
    told = ask(hermes, Asked(choice="auto"))
    assert told.text == "I look."
    assert [call[1:] for call in told.calls] == [WEATHER, WEATHER]
    assert len({call_id for call_id, _, _ in told.calls}) == 2
    assert told.reason == "calls"
    assert sampling(hermes).structure is None


@pytest.mark.parametrize(
    ("choice", "output"),
    [
        ("any", '[{"name": "weather", "parameters": {"city": "Paris"}}]'),
        ("named", '{"city": "Paris"}'),
    ],
)
def test_a_call_can_be_forced(hermes: Served, ask: Ask, choice: str, output: str) -> None:
    generate(hermes, output)
    [call] = ask(hermes, Asked(choice=choice)).calls
    assert call[1:] == WEATHER
    assert structure(hermes).kind == "json_schema"


def test_what_is_no_call_is_text(hermes: Served, ask: Ask) -> None:
    generate(hermes, CALL)
    told = ask(hermes, Asked(choice="none"))
    assert (told.text, told.calls, told.reason) == (CALL, [], "stop")


def test_an_answer_that_is_cut_off_says_so(hermes: Served, ask: Ask) -> None:
    generate(hermes, "abc", "length")
    told = ask(hermes, Asked())
    assert (told.text, told.reason) == ("abc", "length")


def test_an_answer_can_have_a_structure(hermes: Served, ask: Ask) -> None:
    generate(hermes, "{}")
    assert ask(hermes, Asked(schema=SCHEMA)).text == "{}"
    assert json.loads(structure(hermes).text) == SCHEMA


def test_earlier_calls_and_their_results_are_in_the_prompt(hermes: Served, ask: Ask) -> None:
    generate(hermes, "So.")
    ask(hermes, Asked(has_result=True))
    assert prompt(hermes) == f"<user>hi<assistant>I look.{CALL}<tool>sunny<assistant>"


def test_an_image_has_its_place(served: Served, ask: Ask) -> None:
    ask(served, Asked(image=b"png bytes"))
    assert only_generation(served).prompt == MultimodalPrompt(
        "<user>hi<image><assistant>", (b"png bytes",)
    )


def test_an_unknown_model_is_not_found(hermes: Served, protocol: Protocol) -> None:
    hermes.refused(protocol.path, protocol.body(Asked(model="unknown")), status=404)
    assert hermes.controller.requests(rq.Generate) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_a_status(
    hermes: Served, protocol: Protocol, stream: bool
) -> None:
    refuse(hermes, ErrorCode.ENGINE_GONE)
    response = hermes.post(protocol.path, {**protocol.body(Asked()), "stream": stream})
    assert response.status_code == 503
    assert "L011" in response.json()["error"]["message"]
    assert response.headers["retry-after"]


def test_a_failure_after_the_first_token_is_the_last_event(
    hermes: Served, protocol: Protocol
) -> None:
    refuse(hermes, ErrorCode.ENGINE_GONE, after_one_token=True)
    *_, last = protocol.events(hermes, Asked())
    assert "L011" in json.dumps(last)
