"""Envoy as others configure it, before docks: without a picker, or with one that streams bodies."""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from loradock.fleet.envoy import _address, configuration, write_docks
from tests.support.fleet.fleets import Process


class Proxy(Process):
    """Envoy at a port of this machine; `picker` is the socket or address of one, if it has one.

    `is_streamed`: as gateways of Kubernetes ask an endpoint picker, and not as our own front does.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        docks: Collection[str],
        picker: dict[str, Any] | None = None,
        *,
        is_streamed: bool = False,
    ) -> None:
        directory.mkdir(exist_ok=True)
        write_docks(directory, docks)
        found = configuration(directory, "127.0.0.1", port, None)
        resources = found["static_resources"]
        cluster, asked = resources["clusters"]
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        if picker is None:
            # The router alone.
            del manager["http_filters"][:-1]
        else:
            asked["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"] = {
                "address": picker
            }
        if is_streamed:
            _stream(manager["http_filters"])
            _reach_directly(cluster, docks)
        file = directory / "proxy.json"
        file.write_text(json.dumps(found))
        program = Path(sys.executable).with_name("envoy")
        command = [str(program), "--config-path", str(file), "--use-dynamic-base-id"]
        super().__init__([*command, "--log-level", "warning"], directory / "log")


def _stream(filters: list[dict[str, Any]]) -> None:
    """Let the picker get whole requests and responses, without a way to serve without it."""
    del filters[0]
    picker = filters[0]["typed_config"]
    del picker["failure_mode_allow"], picker["metadata_options"], picker["allow_mode_override"]
    picker["processing_mode"] = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }


def _reach_directly(cluster: dict[str, Any], docks: Collection[str]) -> None:
    """Replace the relay by the docks' own addresses, as a gateway's control plane would."""
    del cluster["eds_cluster_config"], cluster["transport_socket"]
    endpoints = [{"endpoint": {"address": _address(one)}} for one in docks]
    cluster["type"] = "STATIC"
    cluster["load_assignment"] = {
        "cluster_name": cluster["name"],
        "endpoints": [{"lb_endpoints": endpoints}],
    }
