"""Adapters loaded and unloaded over HTTP, with the bodies and answers of vLLM and of SGLang."""

from pathlib import Path
from typing import Any

import pytest

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.gateway.outputs import refuse
from tests.support.gateway.served import Adapters, Served, serve_gateway
from tests.support.simulation.standin_controller import StandIn

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


@pytest.fixture
def adapters(served: Served) -> Any:
    return Adapters(served.controller)


@pytest.mark.usefixtures("adapters")
def test_vllms_load_and_unload(served: Served) -> None:
    response = served.post(LOAD, {"lora_name": "new", "lora_path": "roots/new"})
    assert (response.status_code, response.text) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    assert response.headers["content-type"].startswith("text/plain")
    # A client reads its own writes.
    cards = served.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny-chat", "new", "reverse", "upper"]
    response = served.post(UNLOAD, {"lora_name": "new", "lora_int_id": 5})
    assert response.text == "Success: LoRA adapter 'new' removed successfully."
    assert "new" not in [card["id"] for card in served.get("/v1/models").json()["data"]]


@pytest.mark.usefixtures("adapters")
def test_a_loaded_name_is_refused_unless_it_is_to_be_replaced(served: Served) -> None:
    body = {"lora_name": "own", "lora_path": "roots/own"}
    served.post(LOAD, body)
    response = served.post(LOAD, body)
    assert response.status_code == 400
    assert "has already been loaded" in response.json()["error"]["message"]
    assert response.headers["x-loradock-code"] == "L010"
    more = {"load_inplace": True, "is_3d_lora_weight": True, "lora_int_id": 3}
    assert served.post(LOAD, body | more).status_code == 200
    request = served.controller.requests(rq.LoadAdapter)[-1]
    assert (request.adapter, request.path, request.replace) == ("own", "roots/own", True)
    assert served.post(UNLOAD, {"lora_name": "own"}).status_code == 200


@pytest.mark.usefixtures("adapters")
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (LOAD, {}, 400, None),
        (LOAD, {"lora_name": "a"}, 400, None),
        (LOAD, {"lora_name": "a", "lora_path": 5}, 400, "lora_path"),
        (LOAD, {"lora_name": "../a", "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "a/b", "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "tiny-chat", "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "a", "lora_path": "missing"}, 404, "lora_path"),
        (UNLOAD, {}, 400, "lora_name"),
        (UNLOAD, {"lora_name": "nope"}, 404, "lora_name"),
        (UNLOAD, {"lora_name": "../x"}, 404, "lora_name"),
    ],
)
def test_what_can_not_be_done_is_refused(
    served: Served, path: Any, body: Any, status: int, param: Any
) -> None:
    response = served.post(path, body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert response.json()["error"]["param"] == param


@pytest.mark.usefixtures("adapters")
def test_sglangs_load_and_unload(served: Served) -> None:
    body = {"lora_name": "new", "lora_path": "roots/new", "pinned": True}
    answer = served.post("/load_lora_adapter", body).json()
    assert answer["success"]
    assert answer["loaded_adapters"]["new"] == "roots/new"
    assert served.controller.adapters["new"].held
    again = served.post("/load_lora_adapter", body)
    assert again.status_code == 400
    assert not again.json()["success"]
    assert "already" in again.json()["error_message"]
    answer = served.post("/unload_lora_adapter", {"lora_name": "new"}).json()
    assert answer["success"]
    assert "new" not in answer["loaded_adapters"]
    assert served.post("/unload_lora_adapter", {"lora_name": "new"}).status_code == 404


def test_adapters_are_not_changed_unless_the_operator_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandIn(tmp_path) as controller:
        with serve_gateway(controller) as gateway:
            for path in (LOAD, UNLOAD, "/load_lora_adapter", "/v1/lora_adapters/upper/evict"):
                response = gateway.post(path, {"lora_name": "upper"})
                assert response.status_code == 403
                assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in response.json()["error"]["message"]
            assert LOAD not in gateway.get("/openapi.json").json()["paths"]
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        with serve_gateway(controller) as gateway:
            assert gateway.post(UNLOAD, {"lora_name": "nope"}).status_code == 404


@pytest.mark.parametrize("move", ["hold", "release", "evict"])
def test_an_adapter_is_moved(served: Served, move: str) -> None:
    answer = served.post(f"/v1/lora_adapters/upper/{move}").json()
    assert answer == {"id": "upper", "state": "gpu-slot", "slot": 2, "generation": 5}
    kinds = {
        "hold": rq.HoldAdapter,
        "release": rq.ReleaseAdapter,
        "evict": rq.EvictAdapter,
    }
    [request] = served.controller.requests(kinds[move])
    assert request.adapter == "upper"


@pytest.mark.parametrize("to", ["cpu-cached", "pinned", "gpu-slot"])
def test_an_adapter_is_prefetched_to_a_tier(served: Served, to: str) -> None:
    answer = served.post("/v1/lora_adapters/upper/prefetch", {"to": to}).json()
    assert answer == {"id": "upper", "state": "evicted", "goal": to}
    [request] = served.controller.requests(rq.PrefetchAdapter)
    assert (request.adapter, request.target) == ("upper", to)
    assert served.post("/v1/lora_adapters/upper/prefetch", {"to": "disk"}).status_code == 400


@pytest.mark.parametrize("name", ["nope", "a b", "..", "%2e%2e", "a%2fb"])
def test_an_unknown_adapter_is_not_registered_by_a_move(served: Served, name: Any) -> None:
    assert served.post(f"/v1/lora_adapters/{name}/hold").status_code == 404
    assert served.controller.requests(rq.HoldAdapter) == []


def test_adapters_have_their_counters(served: Served) -> None:
    answer = served.get("/v1/lora_adapters").json()
    assert [card["id"] for card in answer["data"]] == ["reverse", "upper"]
    card = served.get("/v1/lora_adapters/upper").json()
    assert card == answer["data"][1]
    assert (card["state"], card["slot"], card["rank"]) == ("gpu-slot", 2, 8)
    assert card["bytes"] == {"host": 0, "pinned": 4096, "device": 4096}
    assert served.get("/v1/lora_adapters/reverse").json()["slot"] is None
    assert served.get("/v1/lora_adapters/nope").status_code == 404


def test_an_absent_engine_is_answered_with_503(served: Served) -> None:
    refuse(served, ErrorCode.ENGINE_GONE, rq.ShowAdapter)
    response = served.get("/v1/lora_adapters/upper")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-loradock-code"] == "L011"


def test_models_are_listed_with_their_parents(served: Served) -> None:
    base, *adapters = served.get("/v1/models").json()["data"]
    assert base["id"] == "tiny-chat"
    assert base["parent"] is None
    assert base["root"].endswith("tiny-chat")
    assert base["max_model_len"] == 512
    assert [(card["id"], card["parent"]) for card in adapters] == [
        ("reverse", "tiny-chat"),
        ("upper", "tiny-chat"),
    ]
    assert served.get("/v1/models/upper").json()["root"] == "adapters/upper"
    assert served.get("/v1/models/tiny-chat").json()["id"] == "tiny-chat"
    assert served.get("/v1/models/tiny-chat:upper").json()["id"] == "upper"
    for name in ("nope", "a/b", "tiny-chat:nope"):
        response = served.get(f"/v1/models/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "model"
