"""The configuration of Envoy for a front: one listener, the docks, and the picker.

The docks are in files that the picker's process replaces when the catalogue changes. Envoy serves
with the last ones if that process is away, and takes docks in turn then.

Requests reach a dock through a relay within Envoy: an internal listener that passes bytes on to a
cluster of this dock alone. Envoy closes passed-on connections when the dock's health check fails,
which it does not do with its own HTTP connections: a request in a dock that hangs is then tried
elsewhere, instead of waiting for it.
"""

import asyncio
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final

from loradock.fleet.ext_proc import BODY_BYTES_MAX
from loradock.fleet.processor import DESTINATION, MODEL, NAMESPACE
from loradock.gateway.http.errors import CODE_HEADER
from loradock.messages.errors import ErrorCode

RECEIVE_S: Final = 60
"""Time within which a request has to arrive; as long as docks wait for one by default."""

RETRIES: Final = 3

_OWN_FILES: Final = (
    *(ErrorCode.NOT_FOUND, ErrorCode.DOES_NOT_FIT, ErrorCode.CONFIG_REFUSED),
    *(ErrorCode.NOT_FINITE, ErrorCode.PATH_NOT_ALLOWED, ErrorCode.CONFLICT),
)
"""What is wrong with a dock's own files of an adapter: others can have the right ones."""

_TYPE: Final = "type.googleapis.com/envoy"
_DOCKS: Final = "docks"
_RELAY: Final = "relay"
_CLUSTERS: Final = "clusters.json"
_ENDPOINTS: Final = "docks.json"

ADMIN_SOCKET: Final = "admin.sock"

RELAYED: Final = f"envoy://{_RELAY}/"
"""What precedes a dock's address in the destination header of our own Envoy."""


LINGER_S: Final = 60.0
"""How long a dock that has left is still checked: if it is lost, its requests end."""


class DockFiles:
    """The files with the docks, in the directory of a front; used in an event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._docks: set[str] = set()
        # Former docks, and when they are forgotten.
        self._left: dict[str, asyncio.TimerHandle] = {}

    def set_docks(self, docks: Iterable[str]) -> None:
        """Send new requests to these docks only."""
        loop, before, self._docks = asyncio.get_running_loop(), self._docks, {*docks}
        for address in self._left.keys() & self._docks:
            self._left.pop(address).cancel()
        for address in before - self._docks:
            self._left[address] = loop.call_later(LINGER_S, self._forget, address)
        write_docks(self._directory, self._docks, self._left)

    def _forget(self, address: str) -> None:
        del self._left[address]
        write_docks(self._directory, self._docks, self._left)


def write_docks(directory: Path, docks: Collection[str], left: Collection[str] = ()) -> None:
    """Write the addresses of the docks, which Envoy reads again; `left`: of former ones."""
    addresses = sorted(docks)
    # A dock's own cluster has to be there before requests are sent to it.
    _replace(directory / _CLUSTERS, {"resources": [_dock(one) for one in sorted([*docks, *left])]})
    endpoints = [_relayed(one) for one in addresses]
    assignment = {
        "@type": f"{_TYPE}.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": _DOCKS,
        "endpoints": [{"lb_endpoints": endpoints}] if endpoints else [],
    }
    _replace(directory / _ENDPOINTS, {"resources": [assignment]})


def write_configuration(directory: Path, host: str, port: int, tls: tuple[str, str] | None) -> Path:
    """Write Envoy's configuration for sockets in a directory; return its file.

    `tls`: the files of certificate and key of the listener.
    """
    file = directory / "envoy.json"
    _replace(file, configuration(directory, host, port, tls))
    return file


def configuration(
    directory: Path, host: str, port: int, tls: tuple[str, str] | None
) -> dict[str, Any]:
    """Return Envoy's bootstrap configuration."""
    return {
        "node": {"id": "front", "cluster": "loradock"},
        "admin": {"address": _pipe(directory / ADMIN_SOCKET)},
        "static_resources": {
            "listeners": [_listener(host, port, tls), _relay()],
            "clusters": [_docks(directory), _picker(directory)],
        },
        "dynamic_resources": {"cds_config": _watched(directory / _CLUSTERS)},
        "bootstrap_extensions": [
            _extension(_RELAY, "bootstrap.internal_listener.v3.InternalListener")
        ],
    }


def _listener(host: str, port: int, tls: tuple[str, str] | None) -> dict[str, Any]:
    manager = _extension(
        "http",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="front",
        # As docks accept; Envoy's own are 60 KiB and 100 headers.
        max_request_headers_kb=64,
        common_http_protocol_options={"max_headers_count": 1000},
        # The address of the client is added to X-Forwarded-For.
        use_remote_address=True,
        # Docks bound the time of a request themselves, once it has reached them whole.
        stream_idle_timeout="0s",
        request_headers_timeout=f"{RECEIVE_S}s",
        request_timeout=f"{RECEIVE_S}s",
        route_config={"virtual_hosts": [_route()]},
        http_filters=[
            _model_of_body(),
            _external_processing(),
            _extension("router", "filters.http.router.v3.Router"),
        ],
    )
    chain: dict[str, Any] = {"filters": [manager]}
    if tls:
        certificate, key = tls
        pair = {"certificate_chain": {"filename": certificate}, "private_key": {"filename": key}}
        chain["transport_socket"] = _extension(
            "tls",
            "transport_sockets.tls.v3.DownstreamTlsContext",
            common_tls_context={"tls_certificates": [pair]},
        )
    return {
        "name": "front",
        "address": {"socket_address": {"address": host, "port_value": port}},
        "per_connection_buffer_limit_bytes": BODY_BYTES_MAX,
        "filter_chains": [chain],
    }


def _route() -> dict[str, Any]:
    return {
        "name": "docks",
        "domains": ["*"],
        "routes": [
            {
                "match": {"prefix": "/"},
                "route": {"cluster": _DOCKS, "timeout": "0s", "retry_policy": _retries()},
            }
        ],
    }


def _retries() -> dict[str, Any]:
    """Return when the next dock is tried: only before an answer has begun."""
    return {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes,retriable-headers",
        "retriable_status_codes": [503],
        "retriable_headers": [
            {"name": CODE_HEADER, "string_match": {"exact": code.value}} for code in _OWN_FILES
        ],
        "num_retries": RETRIES,
        "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
        "retry_host_predicate": [
            _extension("previous", "retry.host.previous_hosts.v3.PreviousHostsPredicate")
        ],
        "host_selection_retry_max_attempts": 5,
    }


def _model_of_body() -> dict[str, Any]:
    """Return the filter that reads the model from a body, so that the picker needs no body.

    Its parser takes a hundred times a body's bytes at worst, so it reads those that declare a
    length of up to five digits; others are sent to the picker.
    """
    rule = {
        "selectors": [{"key": MODEL}],
        "on_present": {"metadata_namespace": NAMESPACE, "key": MODEL},
    }
    reader = _extension(
        "model",
        "filters.http.json_to_metadata.v3.JsonToMetadata",
        request_rules={"rules": [rule], "allow_empty_content_type": True},
    )
    length = {
        "name": "length",
        "typed_config": {
            "@type": f"{_TYPE}.type.matcher.v3.HttpRequestHeaderMatchInput",
            "header_name": "content-length",
        },
    }
    is_short = {
        "single_predicate": {
            "input": length,
            "value_match": {"safe_regex": {"google_re2": {}, "regex": "[0-9]{1,5}"}},
        }
    }
    skip = {"action": _extension("skip", "filters.common.matcher.action.v3.SkipFilter")}
    matcher = {"predicate": {"not_matcher": is_short}, "on_match": skip}
    return _extension(
        "model",
        "common.matching.v3.ExtensionWithMatcher",
        extension_config=reader,
        xds_matcher={"matcher_list": {"matchers": [matcher]}},
    )


def _external_processing() -> dict[str, Any]:
    return _extension(
        "picker",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "1s"},
        # Without the picker, docks are taken in turn.
        failure_mode_allow=True,
        message_timeout="1s",
        # For a body that the filter before has not read.
        allow_mode_override=True,
        metadata_options={"forwarding_namespaces": {"untyped": [NAMESPACE]}},
        # The header has to be sent: with SKIP, Envoy ignores the choice.
        processing_mode={
            "request_header_mode": "SEND",
            "response_header_mode": "SKIP",
            "request_body_mode": "NONE",
            "response_body_mode": "NONE",
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
    )


def _docks(directory: Path) -> dict[str, Any]:
    in_turn = _extension("in_turn", "load_balancing_policies.round_robin.v3.RoundRobin")
    chosen = _extension(
        "chosen",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION}],
        fallback_policy={"policies": [{"typed_extension_config": in_turn}]},
    )
    return {
        "name": _DOCKS,
        "type": "EDS",
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": BODY_BYTES_MAX,
        "eds_cluster_config": {"eds_config": _watched(directory / _ENDPOINTS)},
        "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]},
        "circuit_breakers": _NO_LIMITS,
        # Tells the relay which dock a connection is for.
        "transport_socket": _extension(
            _RELAY,
            "transport_sockets.internal_upstream.v3.InternalUpstreamTransport",
            passthrough_metadata=[{"name": NAMESPACE, "kind": {"host": {}}}],
            transport_socket=_extension("raw", "transport_sockets.raw_buffer.v3.RawBuffer"),
        ),
    }


def _relayed(address: str) -> dict[str, Any]:
    internal = {"server_listener_name": _RELAY, "endpoint_id": address}
    return {
        "endpoint": {"address": {"envoy_internal_address": internal}},
        "metadata": {"filter_metadata": {NAMESPACE: {"cluster": address}}},
    }


def _relay() -> dict[str, Any]:
    cluster = {"text_format_source": {"inline_string": f"%DYNAMIC_METADATA({NAMESPACE}:cluster)%"}}
    chosen = {"object_key": "envoy.tcp_proxy.cluster", "format_string": cluster}
    filters = [
        _extension("to", "filters.network.set_filter_state.v3.Config", on_new_connection=[chosen]),
        _extension(
            "tcp",
            "filters.network.tcp_proxy.v3.TcpProxy",
            stat_prefix=_RELAY,
            # Replaced for each connection.
            cluster="none",
            idle_timeout="0s",
        ),
    ]
    return {"name": _RELAY, "internal_listener": {}, "filter_chains": [{"filters": filters}]}


def _dock(address: str) -> dict[str, Any]:
    """Return the cluster of one dock."""
    return {
        "@type": f"{_TYPE}.config.cluster.v3.Cluster",
        "name": address,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment(address, _address(address)),
        "circuit_breakers": _NO_LIMITS,
        "close_connections_on_host_health_failure": True,
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "upstream_connection_options": {"tcp_keepalive": _KEEPALIVE},
        "health_checks": [
            {
                # A dock that hangs is out, with its requests, within 6 s.
                "timeout": "2s",
                "interval": "1s",
                # A dock that comes back is served without a minute's delay.
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                # Any other name would need --allowed-host of docks on a loopback address.
                "http_health_check": {"path": "/live", "host": "localhost"},
            }
        ],
    }


_NO_LIMITS: Final = {
    "thresholds": [
        dict.fromkeys(
            ("max_connections", "max_pending_requests", "max_requests", "max_retries"), 100_000
        )
    ]
}
"""The docks have bounds; these are Envoy's, of 1,024 each by default. A body that its client sends
slowly is a request in the picker."""

_KEEPALIVE: Final = {"keepalive_probes": 3, "keepalive_time": 2, "keepalive_interval": 2}
"""In seconds: connections to a machine that is cut off end within 8."""


def _picker(directory: Path) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2
        },
        "load_assignment": _assignment("picker", _pipe(directory / "picker.sock")),
        "circuit_breakers": _NO_LIMITS,
    }


def _assignment(cluster: str, address: dict[str, Any]) -> dict[str, Any]:
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {"cluster_name": cluster, "endpoints": endpoints}


def _extension(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    """Return a named part of Envoy, whose type is `kind` among its extensions."""
    return {"name": name, "typed_config": {"@type": f"{_TYPE}.extensions.{kind}", **fields}}


def _watched(path: Path) -> dict[str, Any]:
    return {"path_config_source": {"path": str(path)}}


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _pipe(path: Path) -> dict[str, Any]:
    return {"pipe": {"path": str(path)}}


def _replace(path: Path, value: dict[str, Any]) -> None:
    """Write a file at once: Envoy looks for files that are moved to its path."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=2))
    os.replace(new, path)
