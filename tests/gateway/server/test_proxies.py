"""Browsers of other web sites, and proxies with a prefix, in front of a gateway with a key."""

from collections.abc import Iterator
from typing import Any

import pytest

from loradock.gateway.http.security import with_cors
from loradock.gateway.options import GatewayConfig, GatewayOptions
from loradock.gateway.server.app import root_path_of
from tests.support.gateway.served import Served, model_directory, serve_gateway
from tests.support.simulation.standin_controller import StandIn

SITE = "https://chat.example"
PREFLIGHT = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
KEY = {"authorization": "Bearer key"}


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("gw")
    with (
        StandIn(directory) as controller,
        serve_gateway(
            controller,
            model=str(model_directory(directory)),
            api_keys=("key",),
            allowed_hosts=("gateway.example",),
            allowed_origins=(f'["{SITE}"]', "https://other.example"),
            root_path="/llm/",
            served_model_names=("big", "alias"),
            enable_tokenizer_info_endpoint=True,
        ) as gateway,
    ):
        yield gateway


def test_a_preflight_needs_no_key_but_an_allowed_site(proxied: Served) -> None:
    answer = proxied.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == SITE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    refused = proxied.http.options("/v1/models", headers={**PREFLIGHT, "origin": "https://evil"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_a_preflight_to_an_unknown_host_is_refused(proxied: Served) -> None:
    headers = {**PREFLIGHT, "host": "rebound.example"}
    answer = proxied.http.options("/v1/models", headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("headers", "status"), [(KEY, 200), ({}, 401)])
def test_answers_and_errors_can_be_read_by_the_site(
    proxied: Served, headers: Any, status: int
) -> None:
    answer = proxied.get("/v1/models", origin=SITE, **headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == SITE
    assert "X-LoRADock-Code" in answer.headers["access-control-expose-headers"]
    other = proxied.get("/v1/models", origin="https://evil", **headers)
    assert "access-control-allow-origin" not in other.headers


def test_a_stream_can_be_read_by_the_site(proxied: Served) -> None:
    body = {"prompt": "p", "stream": True}
    answer = proxied.post("/v1/completions", body, origin=SITE, **KEY)
    assert answer.headers["access-control-allow-origin"] == SITE
    assert answer.text.endswith("data: [DONE]\n\n")


def test_without_sites_a_gateway_has_no_cors(served: Served) -> None:
    assert served.http.options("/v1/models", headers=PREFLIGHT).status_code == 405
    assert "access-control-allow-origin" not in served.get("/v1/models", origin=SITE).headers


async def unused(*_: Any) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow_credentials": True}, "--allowed-origins"),
        ({"allowed_methods": ("GET",)}, "--allowed-origins"),
        ({"allowed_origins": ("[1]",)}, "JSON list"),
    ],
)
def test_options_without_effect_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_cors(unused, GatewayOptions(**options))


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models", "/v1/models/big"])
def test_paths_have_the_prefix_or_not(proxied: Served, path: Any) -> None:
    assert proxied.get(path, **KEY).status_code == 200
    assert proxied.get(f"/llm{path}" if path[1] == "v" else path, **KEY).status_code == 200


def test_a_key_is_needed_behind_the_prefix_too(proxied: Served) -> None:
    assert proxied.get("/llm/v1/models").status_code == 401
    assert proxied.get("/llmx/v1/models", **KEY).status_code == 404
    assert proxied.get("/llm/llm/v1/models", **KEY).status_code == 404


def test_the_document_names_the_prefix(proxied: Served) -> None:
    assert proxied.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    for wrong in ("llm", "//evil", "/a b"):
        with pytest.raises(ValueError, match="--root-path"):
            root_path_of(GatewayConfig(root_path=wrong))
    assert not root_path_of(GatewayConfig(root_path="/"))


def test_each_served_name_has_a_card(proxied: Served) -> None:
    cards = proxied.get("/v1/models", **KEY).json()["data"]
    assert [card["id"] for card in cards if card["parent"] is None] == ["big", "alias"]
    assert {card["parent"] for card in cards[2:]} == {"big"}
    for name in ("big", "alias", "upper"):
        assert proxied.get(f"/v1/models/{name}", **KEY).json()["id"] == name


def test_the_tokenizer_is_described_like_its_file(proxied: Served, served: Served) -> None:
    info = proxied.get("/tokenizer_info", **KEY).json()
    assert isinstance(info["tokenizer_class"], str)
    assert "<assistant>" in info["chat_template"]
    assert all(isinstance(info[name], str) for name in info if name.endswith("_token"))
    # It is served on request alone, because it shows the template.
    assert served.get("/tokenizer_info").status_code == 404


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_configuration_is_shown_without_keys(
    proxied: Served, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    answer = proxied.get(f"/server_info?config_format={form}", **KEY)
    info = answer.json()
    assert "hidden" not in answer.text
    assert info["vllm_env"]["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert not {"api_keys", "key"}.intersection(info["vllm_config"])
    if form == "json":
        assert info["vllm_config"]["served_model_names"] == ["big", "alias"]
    else:
        assert "api_keys" not in info["vllm_config"]
    assert proxied.get("/server_info?config_format=xml", **KEY).status_code == 400
    assert proxied.get("/server_info").status_code == 401


def test_ping_is_served_for_both_methods(proxied: Served) -> None:
    assert proxied.http.post("/ping").status_code == proxied.get("/ping").status_code == 200
