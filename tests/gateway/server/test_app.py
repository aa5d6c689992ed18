"""Health, versions, wrong paths and methods, and the OpenAPI document."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from loradock.client import AsyncClient
from loradock.gateway.adapters import models as model_cards
from loradock.gateway.adapters.follower import AdapterTable, Follower
from loradock.gateway.inference.sampling import Labels
from loradock.gateway.options import GatewayConfig
from loradock.gateway.recorder import Recorder
from loradock.gateway.server.health import Health
from loradock.messages import VERSION
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.gateway.served import Served
from tests.support.simulation.message_examples import example_of


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_that_of_the_engine(served: Served, path: Any) -> None:
    assert (served.get(path).status_code, served.get(path).content) == (200, b"")
    usual = served.controller._status
    served.controller.answers[rq.ShowStatus] = lambda request: msgspec.structs.replace(
        usual(request), engine_id=""
    )
    assert served.get(path).status_code == 503
    served.controller.answers[rq.ShowStatus] = lambda request: rq.Refused(
        request.request_id, ErrorCode.ENGINE_GONE, "gone"
    )
    assert served.get(path).status_code == 503


def test_the_reason_why_no_work_is_taken_is_shown(served: Served) -> None:
    assert served.get("/ready").json() == {"ready": True, "reason": ""}
    served.controller.status_changes["unready"] = "no engine is attached"
    response = served.get("/ready")
    served.controller.status_changes.clear()
    assert response.status_code == 503
    assert response.json() == {"ready": False, "reason": "no engine is attached"}
    served.controller.answers[rq.ShowStatus] = lambda request: rq.Refused(
        request.request_id, ErrorCode.ENGINE_GONE, "gone"
    )
    assert served.get("/ready").json()["reason"] == "the controller does not answer"


class Counting(AsyncClient):
    """A client that counts its queries for a status, and those that were in flight at once."""

    def __init__(self) -> None:
        self.queries = self.in_flight = self.in_flight_max = 0

    async def status(
        self, _timeout_s: float | None = None, *, uses: bool = False
    ) -> rq.StatusShown:
        assert uses
        self.queries += 1
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        status: rq.StatusShown = msgspec.structs.replace(example_of(rq.StatusShown), unready="")
        return status


def test_probes_of_health_share_their_queries() -> None:
    """They are public, so anyone can send any number."""

    async def main() -> None:
        client = Counting()
        health = Health(Follower(client, AdapterTable()), Recorder(), GatewayConfig())
        probes = [probe() for probe in (health.health, health.ready) for _ in range(100)]
        assert {answer.status_code for answer in await asyncio.gather(*probes)} == {200}
        # Those that arrived after the first began need a newer answer, and share it.
        assert (client.queries, client.in_flight_max) == (2, 1)

    asyncio.run(main())


def test_version_and_load(served: Served) -> None:
    assert served.get("/version").json() == {"version": VERSION}
    assert served.get("/load").json() == {"server_load": 0}


def test_unknown_paths_and_methods_are_answered_in_json(served: Served) -> None:
    for path in ("/nothing", "/v1", "/v1/models/../../etc", "/docs"):
        response = served.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == 404
    response = served.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "MethodNotAllowedError"
    assert response.headers["allow"] == "POST"


def references(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def test_the_document_describes_every_endpoint(served: Served) -> None:
    document = served.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    operations = [o for methods in document["paths"].values() for o in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    assert all("200" in operation["responses"] for operation in operations)
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "messages" in schemas["ChatRequest"]["required"]


def test_a_mistake_of_ours_is_answered_in_json(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of an endpoint with an exact path, and of one with a name in it.
    monkeypatch.setattr(model_cards, "unix_seconds", lambda: 1 / 0)
    for path in ("/v1/models", "/v1/models/upper"):
        response = served.get(path)
        assert response.status_code == response.json()["error"]["code"] == 500
        assert "ZeroDivisionError" not in response.text
    monkeypatch.undo()
    assert served.get("/v1/models").status_code == 200


def test_head_is_answered_as_get_is(served: Served) -> None:
    response = served.http.head("/version")
    assert (response.status_code, response.content) == (200, b"")


WRONG: tuple[Any, ...] = (True, -1, "\x00", [[]], {"": [{}]}, 10**30)
"""Values of every type of JSON."""


def fields_with_bodies(document: Any) -> Iterator[Any]:
    """Yield (path, field, valid body) for each field of each type of body."""
    schemas, seen = document["components"]["schemas"], set()
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for media in content.values():
            name = media["schema"]["$ref"].rpartition("/")[2]
            if name in seen:
                continue
            seen.add(name)
            schema = schemas[name]
            fields = schema.get("properties", {})
            # Some bodies need one of several fields, which their schemas can't express.
            alternatives = [name for name in ("prompt", "lora_name", "lora_path") if name in fields]
            needed = {name: NEEDED[name] for name in schema.get("required") or alternatives}
            for field in fields:
                yield path, field, needed


NEEDED = {
    "prompt": "p",
    "messages": [{"role": "user", "content": "hello"}],
    "input": "p",
    "text_1": "p",
    "text_2": "p",
    "query": "p",
    "documents": ["p"],
    "tokens": [1],
    "lora_name": "new",
    "lora_path": "new",
    "model": "upper",
    "max_tokens": 4,
}


def test_a_wrong_value_of_any_field_is_refused_by_its_name(served: Served) -> None:
    fields = list(fields_with_bodies(served.get("/openapi.json").json()))
    assert len({path for path, _, _ in fields}) > 8
    accepted = {(path, field): 0 for path, field, _ in fields}
    others = []
    for path, field, body in fields:
        for value in WRONG:
            response = served.post(path.replace("{name}", "upper"), {**body, field: value})
            assert response.status_code < 500, (path, field, value, response.text)
            accepted[path, field] += response.status_code == 200
            if response.status_code == 400:
                error = response.json().get("error") or {}
                if error.get("param") not in (field, None):
                    others.append((path, field, value, error))
    assert others == []
    # No field takes values of all types without a look at them.
    unchecked = {field for (_, field), count in accepted.items() if count == len(WRONG)}
    assert unchecked <= ANY


ANY = {"tools", "documents", "chat_template_kwargs", "tool_choice", "guided_json"}.union(
    Labels.__struct_fields__
)
"""What templates read, a schema, and labels that are not read may be any JSON."""
