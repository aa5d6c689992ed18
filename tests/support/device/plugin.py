"""`pytest --simulated-device`: tests on the simulated device fail by what it reports."""

import gc
from collections.abc import Iterator

import pytest

from tests.support.device import RECORD, install
from tests.support.device.streams import MEMORY
from tests.support.device.tensors import simulated_calls


class SimulatedDevicePlugin:
    """Installed before any test is collected, because their marks ask for a CUDA device."""

    def __init__(self) -> None:
        install()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Run a test and the fixtures that it needs with the device."""
        with simulated_calls():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Fail a test whose operations were reported."""
        # What an earlier test has left, as an engine with its graphs, is not freed in this one.
        gc.collect()
        MEMORY.sweep()
        RECORD.errors.clear()
        result = yield
        if RECORD.errors:
            lines = [f"{n} times: {text}: {where}" for (text, where), n in RECORD.errors.items()]
            pytest.fail("the simulated device reports\n" + "\n".join(lines), pytrace=False)
        return result
