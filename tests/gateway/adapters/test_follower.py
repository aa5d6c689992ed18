"""The table follows the controller: new adapters, lost frames, restarts, and silence."""

import pytest

from messages import events as ev
from messages import requests as rq
from tests.support.gateway.served import serve_gateway
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import wait_until


@pytest.fixture
def gateway(tmp_path):
    with StandIn(tmp_path) as controller, serve_gateway(controller) as served:
        yield served


def listed(gateway):
    return [card["id"] for card in gateway.get("/v1/models").json()["data"][1:]]


def metric(gateway, line):
    return f"\n{line}\n" in gateway.get("/metrics").text


def test_new_and_removed_adapters_are_seen(gateway):
    controller = gateway.controller
    controller.adapters["new"] = view("new")
    controller.publish(ev.AdapterAccepted("new", "ab", 8, 100), ev.AdapterCached("new"))
    wait_until(lambda: "new" in listed(gateway))
    del controller.adapters["new"]
    controller.publish(ev.AdapterRemoved("new"))
    wait_until(lambda: "new" not in listed(gateway))


def test_lost_frames_are_fetched(gateway):
    gateway.controller.publish(ev.AdapterEvicted("upper", "policy"), silently=True)
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 1.0'))


def test_each_event_is_counted_once_over_a_restart(gateway):
    controller = gateway.controller
    controller.publish(ev.AdapterEvicted("upper", "policy"))
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 1.0'))
    controller.restart()
    controller.publish(ev.ControllerResumed(2), ev.AdapterEvicted("upper", "policy"))
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 2.0'))


def test_many_changes_are_read_as_one_list(gateway):
    controller = gateway.controller
    names = [f"many-{number}" for number in range(500)]
    controller.adapters = {name: view(name, "cpu-cached") for name in names}
    lists = len(controller.requests(rq.ListAdapters))
    controller.publish(*(ev.AdapterCached(name) for name in names))
    wait_until(lambda: len(listed(gateway)) == 500)
    assert len(controller.requests(rq.ListAdapters)) > lists
    assert len(controller.requests(rq.ShowAdapter)) == 0
