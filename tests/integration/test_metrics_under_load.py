"""What routers and autoscalers read while requests wait for rows and for slots.

A server with 2 slots and 3 rows has 16 requests of 5 adapters and of the base model, which last
until the test ends them. So it is known how many are in flight, and with which adapters.
"""

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loradock.client import Client
from loradock.messages.requests import StatusShown
from tests.support.engine.engine_examples import NAMES
from tests.support.engine.serve_process import serve, status_once
from tests.support.gateway.served import post_bytes
from tests.support.waiting import HANG_S, wait_until

pytest_plugins = ("tests.support.engine.engine_fixtures",)

SLOTS, ROWS = 2, 3
CONTEXT = 1 << 20
LOAD = (*NAMES * 3, "base")
SCRAPES = 50
COMMON = ("model_name", "engine")
OUTPUT = {"prompt": "a", "max_tokens": CONTEXT // 2, "ignore_eos": True}


class Scrape(NamedTuple):
    """One scrape: the value of each name and label, and the adapters that a router reads."""

    values: dict[tuple[str, str], float]
    slots: int
    ready: frozenset[str]
    waiting: frozenset[str]

    def of(self, name: str, label: str = "") -> float:
        return self.values[name, label]


class Server:
    """A server with a gateway."""

    def __init__(self, directory: Path, url: str, first: dict[str, Any]) -> None:
        self.directory = directory
        # The metrics once the server was ready.
        self.first = first
        self.http = httpx.Client(base_url=url, timeout=HANG_S)
        self.address = (self.http.base_url.host, self.http.base_url.port)

    def scrape(self) -> Scrape:
        values, info = {}, {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                labels = [text for key, text in sample.labels.items() if key not in COMMON]
                values[sample.name, ",".join(labels)] = sample.value
                if sample.name == "vllm:lora_requests_info":
                    info = sample.labels
        names = (
            frozenset(filter(None, info[f"{state}_lora_adapters"].split(",")))
            for state in ("running", "waiting")
        )
        return Scrape(values, int(info["max_lora"]), *names)


@pytest.fixture(scope="module")
def server(
    model_directory: Path, adapter_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The server, of a model whose outputs can be long."""
    directory = tmp_path_factory.mktemp("load") / "d"
    model = directory.with_name("base")
    shutil.copytree(model_directory, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    log_file = directory.with_suffix(".log")
    options = ["--http", "127.0.0.1:0", "--max-loras", str(SLOTS), "--max-num-seqs", str(ROWS)]
    options += ["--adapter-root", str(adapter_root), "--max-lora-rank", "16"]
    options += ["--kv-cache-bytes", "1GiB"]
    for name in NAMES:
        options += ["--lora-modules", f"{name}={adapter_root / name}"]

    def url() -> str:
        lines = [line for line in log_file.read_text().splitlines() if "gateway serves" in line]
        return lines[-1].partition("url=")[2].strip() if lines else ""

    with serve(directory, *options, model=model):
        wait_until(url, lambda: log_file.stat().st_size)
        status_once(directory, lambda status: bool(status.engine_id))
        with Client(directory, timeout_s=HANG_S) as client:
            found = Server(directory, url(), client.metrics())
        wait_until(
            lambda: len(found.http.get("/v1/models").json()["data"]) == 1 + len(NAMES),
            lambda: log_file.stat().st_size,
        )
        yield found
        found.http.close()


@contextmanager
def requests_in_flight(server: Server) -> Iterator[Client]:
    """Yield a client of the controller, which has accepted all requests and has no other."""
    with ExitStack() as stack:
        client = stack.enter_context(Client(server.directory, timeout_s=HANG_S))
        wait_until(lambda: client.status().requests == 0)
        for name in LOAD:
            connection = stack.enter_context(socket.create_connection(server.address))
            body = json.dumps(OUTPUT | {"model": name}).encode()
            connection.sendall(post_bytes("/v1/completions", body))
        wait_until(lambda: client.status().requests == len(LOAD))
        yield client


@pytest.fixture(scope="module")
def load(server: Server) -> Iterator[Client]:
    """A client of the controller, which has accepted all requests and has no other."""
    with requests_in_flight(server) as client:
        yield client


@pytest.fixture(scope="module")
def scrapes(server: Server, load: Client) -> list[Scrape]:
    """Scrapes until all rows were in use at once and each adapter was in a slot, in its turn."""
    found: list[Scrape] = []

    def has_seen_all() -> bool:
        found.append(server.scrape())
        seen = frozenset().union(*(scrape.ready for scrape in found))
        most = max(scrape.of("vllm:num_requests_running") for scrape in found)
        is_used = any(scrape.of("vllm:kv_cache_usage_perc") for scrape in found)
        return len(found) >= SCRAPES and seen == set(NAMES) and most == ROWS and is_used

    wait_until(has_seen_all)
    return found


def test_the_engine_is_described_from_the_first_moment_on(server: Server) -> None:
    assert server.first["performance"]["punica_kernel_enabled"]
    assert server.first["memory"]["device"]["size_bytes"] > 0
    assert server.first["engine"]["arena_bytes_max"] > 0
    assert server.first["engine"]["kv_bytes_max"] > 0


def test_nothing_is_in_flight_once_the_clients_have_left(server: Server) -> None:
    with requests_in_flight(server):
        scrape = server.scrape()
        # At times all requests of one adapter run, and none of them waits.
        assert scrape.waiting
        assert scrape.ready | scrape.waiting == set(NAMES)
    with Client(server.directory, timeout_s=HANG_S) as client:
        wait_until(lambda: client.status().requests == 0)
    after = server.scrape()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "loradock_leases"):
        assert after.of(name) == 0
    assert after.waiting == frozenset()


def test_requests_in_flight_run_or_wait_in_every_scrape(scrapes: list[Scrape]) -> None:
    for scrape in scrapes:
        running = scrape.of("vllm:num_requests_running")
        waiting = scrape.of("vllm:num_requests_waiting")
        reason = "vllm:num_requests_waiting_by_reason"
        assert running + waiting == len(LOAD)
        assert running <= ROWS
        assert scrape.of(reason, "capacity") + scrape.of(reason, "deferred") == waiting


def test_numbers_under_other_names_are_the_same(scrapes: list[Scrape]) -> None:
    for scrape in scrapes:
        running = scrape.of("loradock_engine_running")
        queued = scrape.of("loradock_engine_waiting")
        absent = scrape.of("loradock_requests_waiting_for_residency")
        reason = "vllm:num_requests_waiting_by_reason"
        assert running == scrape.of("vllm:num_requests_running")
        assert queued == scrape.of(reason, "capacity")
        assert absent == scrape.of(reason, "deferred")
        assert scrape.of("loradock_requests_pending") == len(LOAD)
        # All but the base model's, and but those whose turn is to end since others wait.
        assert scrape.of("loradock_leases") <= running + queued - 1


def test_a_router_learns_which_adapters_are_ready_and_which_wait(scrapes: list[Scrape]) -> None:
    for scrape in scrapes:
        assert scrape.slots == SLOTS
        assert len(scrape.ready) <= SLOTS
        assert set(NAMES) <= scrape.ready | scrape.waiting <= set(NAMES)
        loaded = {label for name, label in scrape.values if name == "vllm:lora_adapter_loaded"}
        assert loaded == scrape.ready
        assert scrape.of("vllm:num_gpu_loaded_lora_adapters") == len(scrape.ready)
        assert scrape.of("loradock_adapters", "gpu-slot") >= len(scrape.ready)


def test_adapters_by_state_are_all_adapters(scrapes: list[Scrape]) -> None:
    for scrape in scrapes:
        states = [
            value for (name, _), value in scrape.values.items() if name == "loradock_adapters"
        ]
        assert sum(states) == len(NAMES)


def test_the_status_and_the_gateway_agree(server: Server, load: Client) -> None:
    status: StatusShown = load.status(uses=True)
    assert status.running + status.queued + status.waiting == len(LOAD)
    assert (status.engine.running, status.engine.waiting) == (status.running, status.queued)
    assert sum(use.running + use.queued + use.waiting for use in status.uses) == len(LOAD) - 1
    assert server.http.get("/load").json() == {"server_load": len(LOAD)}
    cards = server.http.get("/v1/lora_adapters").json()["data"]
    assert sum(card["leases"] + card["waiting"] for card in cards) == len(LOAD) - 1


def test_the_page_follows_requests_without_events(server: Server, load: Client) -> None:
    """The sum of an adapter's requests is the same in every view of it that the page receives."""
    counts: dict[str, int] = {}
    with server.http.stream("GET", "/events") as response:
        kind = ""
        for line in response.iter_lines():
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if line.startswith("data: ") and kind in ("snapshot", "adapters"):
                data = json.loads(line.removeprefix("data: "))
                cards = data["adapters"] if kind == "snapshot" else data
                counts |= {card["id"]: card["leases"] + card["waiting"] for card in cards}
            if counts == dict.fromkeys(NAMES, 3):
                return


def test_a_token_is_counted_when_it_is_generated(server: Server, load: Client) -> None:
    name = ("vllm:generation_tokens_total", "")
    first = server.scrape().values[name]
    wait_until(lambda: server.scrape().values[name] > first)


def test_the_cache_has_a_size(scrapes: list[Scrape], load: Client) -> None:
    engine = load.status().engine
    labels = f"{engine.kv_block_tokens},float32,True,{engine.kv_blocks}"
    for scrape in scrapes:
        assert scrape.of("vllm:cache_config_info", labels) == 1
        assert 0 <= scrape.of("vllm:kv_cache_usage_perc") <= 1
    assert engine.kv_bytes_max % engine.kv_blocks == 0
