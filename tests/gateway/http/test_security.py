"""API keys: from options, file and environment, and which endpoints need one."""

import pytest

from gateway.http.security import ApiKeys, configured_keys
from gateway.options import GatewayOptions
from tests.support.gateway.served import serve_gateway
from tests.support.simulation.standin_controller import StandIn

PUBLIC = {"/health", "/ping", "/version", "/load", "/metrics", "/"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    with (
        StandIn(tmp_path_factory.mktemp("gw")) as controller,
        serve_gateway(
            controller, api_keys=("one", "schlüssel"), allow_runtime_lora_updating=True
        ) as gateway,
    ):
        yield gateway


def test_every_endpoint_needs_a_key_but_the_public_ones(keyed):
    paths = keyed.get("/openapi.json").json()["paths"]
    assert len(paths) > 20
    for path, methods in paths.items():
        for method, operation in methods.items():
            response = keyed.http.request(method, path.replace("{", "").replace("}", ""))
            if path in PUBLIC:
                assert response.status_code == 200, path
                assert "security" not in operation
            else:
                assert response.status_code == 401, path
                assert response.json() == {"error": "Unauthorized"}
                assert "401" in operation["responses"]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer one", 200),
        ("bearer  one", 200),
        ("Bearer schlüssel".encode(), 200),
        ("Bearer one2", 401),
        ("Bearer on", 401),
        ("Bearer", 401),
        ("one", 401),
        ("Basic one", 401),
        ("Bearer \udcff".encode("utf-8", "surrogateescape"), 401),
    ],
)
def test_a_request_has_one_of_the_keys(keyed, value, status):
    assert keyed.get("/v1/models", authorization=value).status_code == status


def test_keys_come_from_options_file_and_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("of-file\n\n  spaced \n")
    options = GatewayOptions(api_keys=("of-option",), api_key_file=str(file))
    environment = {"LORADOCK_API_KEY": "own", "VLLM_API_KEY": "vllm"}
    expected = ("of-option", "of-file", "spaced", "own", "vllm")
    assert configured_keys(options, environment) == expected
    assert configured_keys(GatewayOptions(), {"VLLM_API_KEY": ""}) == ()


def test_a_file_without_keys_does_not_open_the_gateway(tmp_path):
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(ValueError, match="no API key"):
        configured_keys(GatewayOptions(api_key_file=str(file)), {})
    with pytest.raises(OSError, match="none"):
        configured_keys(GatewayOptions(api_key_file=str(tmp_path / "none")), {})
    with pytest.raises(ValueError, match="empty"):
        configured_keys(GatewayOptions(api_keys=("",)), {})


def test_without_keys_requests_need_none():
    assert ApiKeys(()).accept({"headers": []})
