"""Health, versions, wrong paths and methods, and the OpenAPI document."""

import msgspec
import pytest

from gateway.adapters import views as model_cards
from messages import requests as rq
from messages.errors import ErrorCode
from messages.version import VERSION


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_that_of_the_engine(served, path):
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


def test_version_and_load(served):
    assert served.get("/version").json() == {"version": VERSION}
    assert served.get("/load").json() == {"server_load": 0}


def test_unknown_paths_and_methods_are_answered_in_json(served):
    for path in ("/nothing", "/v1", "/v1/models/../../etc", "/docs"):
        response = served.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == 404
    response = served.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "MethodNotAllowedError"
    assert response.headers["allow"] == "POST"


def references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def test_the_document_describes_every_endpoint(served):
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


def test_a_mistake_of_ours_is_answered_in_json(served, monkeypatch):
    # Of an endpoint with an exact path, and of one with a name in it.
    monkeypatch.setattr(model_cards, "unix_seconds", lambda: 1 / 0)
    for path in ("/v1/models", "/v1/models/upper"):
        response = served.get(path)
        assert response.status_code == response.json()["error"]["code"] == 500
        assert "ZeroDivisionError" not in response.text
    monkeypatch.undo()
    assert served.get("/v1/models").status_code == 200


def test_head_is_answered_as_get_is(served):
    response = served.http.head("/version")
    assert (response.status_code, response.content) == (200, b"")
