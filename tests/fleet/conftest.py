"""Fixtures for the tests of the fleet."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.fleet.etcd import Etcd, etcd
from tests.support.fleet.fleets import Fleet
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def one_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A cluster of one member."""
    with etcd(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fleet(one_etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three docks and a front."""
    with Fleet(one_etcd, tmp_path_factory.mktemp("fleet")) as started:
        yield started


@pytest.fixture(autouse=True)
def _whole_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start again what a test has killed, so that the next one finds the whole fleet."""
    yield
    if "fleet" in request.fixturenames:
        started = request.getfixturevalue("fleet")
        for dock in [*started.docks]:
            dock.signal(signal.SIGCONT)
            dock.be_silent(False)
            if dock.process.poll() is not None or not dock.child("member"):
                dock.kill()
                started.restart(dock)
        wait_until(started.is_whole, what="the fleet after a test")
