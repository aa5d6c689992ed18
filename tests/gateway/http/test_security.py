"""API keys: from options, file and environment, and which endpoints need one; names of hosts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from loradock.gateway.http.endpoint import Endpoint
from loradock.gateway.http.security import AccessCheck, allowed_hosts, configured_keys, is_open
from loradock.gateway.options import GatewayConfig, GatewayOptions
from tests.support.gateway.served import Served, serve_gateway
from tests.support.simulation.standin_controller import StandIn

PUBLIC = {"/health", "/ping", "/ready", "/live", "/version", "/load", "/metrics", "/"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        StandIn(tmp_path_factory.mktemp("gw")) as controller,
        serve_gateway(
            controller, api_keys=("one", "schlüssel"), allow_runtime_lora_updating=True
        ) as gateway,
    ):
        yield gateway


def test_every_endpoint_needs_a_key_but_the_public_ones(keyed: Served) -> None:
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
                if path.startswith("/v1/messages"):
                    assert response.json()["error"]["type"] == "authentication_error"
                else:
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
def test_a_request_has_one_of_the_keys(keyed: Served, value: Any, status: int) -> None:
    assert keyed.get("/v1/models", authorization=value).status_code == status


@pytest.mark.parametrize(("key", "status"), [("one", 200), ("one2", 401), ("", 401)])
def test_a_key_may_be_in_the_header_of_anthropic(keyed: Served, key: Any, status: int) -> None:
    assert keyed.get("/v1/models", **{"x-api-key": key}).status_code == status


def test_keys_come_from_options_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("of-file\n\n  spaced \n")
    options = GatewayOptions(api_keys=("of-option",), api_key_file=str(file))
    environment = {"LORADOCK_API_KEY": "own", "VLLM_API_KEY": "vllm"}
    expected = ("of-option", "of-file", "spaced", "own", "vllm")
    assert configured_keys(options, environment) == expected
    assert configured_keys(GatewayOptions(), {"VLLM_API_KEY": ""}) == ()


def test_a_file_without_keys_does_not_open_the_gateway(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(ValueError, match="must contain an API key"):
        configured_keys(GatewayOptions(api_key_file=str(file)), {})
    with pytest.raises(OSError, match="none"):
        configured_keys(GatewayOptions(api_key_file=str(tmp_path / "none")), {})
    with pytest.raises(ValueError, match="empty"):
        configured_keys(GatewayOptions(api_keys=("",)), {})


def test_without_keys_requests_need_none() -> None:
    async def handler() -> str:
        return ""

    endpoint = Endpoint(method="GET", path="/", handler=handler, summary="")
    for keys, is_refused in (((), False), (("k",), True)):
        refusal = AccessCheck(keys, "", updating=False).refusal(endpoint, {"headers": []})
        assert (refusal is not None) == is_refused


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        StandIn(tmp_path_factory.mktemp("gw")) as controller,
        serve_gateway(controller, allowed_hosts=("Proxy.example",)) as gateway,
    ):
        yield gateway


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000")),
        *((host, 200) for host in ("[::1]", "proxy.example", "proxy.example.:443", "")),
        *((host, 403) for host in ("evil.example", "evil.example:8000", "localhost.evil.example")),
        *((host, 403) for host in ("127.0.0.2", "[::2]:8000", "x" * 5000)),
    ],
)
def test_without_keys_a_request_has_to_name_this_host(
    local: Served, host: Any, status: int
) -> None:
    for path in ("/v1/models", "/health", "/", "/openapi.json", "/not-there"):
        response = local.get(path, host=host)
        assert response.status_code == (404 if (path, status) == ("/not-there", 200) else status)
    if status == 403:
        assert "--allowed-host" in response.json()["error"]["message"]


def test_a_request_without_a_host_is_served(local: Served) -> None:
    assert local.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_hosts_are_compared_where_a_web_page_could_reach_the_gateway() -> None:
    own = {"localhost", "127.0.0.1", "::1"}

    def hosts(keys: Any = (), **options: Any) -> Any:
        return allowed_hosts(GatewayConfig(**options), needs_key=bool(keys))

    assert hosts() == own
    assert hosts(host="127.0.0.9") == own | {"127.0.0.9"}
    assert hosts(host="localhost") == hosts(host="::1") == own
    assert hosts(("key",)) is hosts(ssl_certfile="c") is hosts(host="0.0.0.0") is None
    assert hosts(("key",), allowed_hosts=("A",), host="0.0.0.0") == own | {"a", "0.0.0.0"}
    assert hosts(allowed_hosts=("*",)) is None


@pytest.mark.parametrize(
    ("keys", "options", "expected"),
    [
        ((), {"host": "0.0.0.0"}, True),
        ((), {"host": "0.0.0.0", "ssl_certfile": "c"}, True),
        ((), {"host": "0.0.0.0", "ssl_ca_certs": "c"}, False),
        ((), {"host": "127.0.0.1"}, False),
        (("key",), {"host": "0.0.0.0"}, False),
    ],
)
def test_an_open_gateway_is_seen(keys: Any, options: Any, expected: bool) -> None:
    assert is_open(GatewayConfig(**options), needs_key=bool(keys)) is expected


def test_a_gateway_that_serves_everyone_warns(tmp_path: Path) -> None:
    with StandIn(tmp_path) as controller, capture_logs() as logs:
        for host, lines in (("127.0.0.1", 0), ("0.0.0.0", 1)):
            with serve_gateway(controller, host=host):
                found = [one for one in logs if "no API key is set" in one["event"]]
                assert len(found) == lines
