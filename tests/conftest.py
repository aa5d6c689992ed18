"""Settings of every test run: no result depends on the machine's speed, and no warning is shown."""

import sys
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests.support.plain_logs import reset_logs
from tests.support.waiting import HANG_S

PROFILE: Final = "loradock"

WARNING_FILTERS: Final = (
    # A warning about a line of ours is a failure.
    r"error:::(loradock|examples|benchmarks|tests)\.",
    # peft reads a model attribute that transformers renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # Adapters of ours have such patterns, and embeddings; peft reports both each time.
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",
    "ignore:Setting `save_embedding_layers` to `True`:UserWarning",
    "ignore:Model has `tie_word_embeddings=True` and a tied layer is part:UserWarning",
    # Tests read pickles with random damage: in the protocol's number, or in the name of a class.
    "ignore:Detected pickle protocol:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
)
"""The ignored warnings are those of libraries, caused on purpose or not avoidable."""

# The parent is the profile that Hypothesis chose for the environment: under CI it has no example
# database and is derandomized. A slow machine fails neither by `deadline` nor by `too_slow`.
settings.register_profile(
    PROFILE,
    parent=settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    print_blob=True,
    suppress_health_check=(HealthCheck.too_slow,),
)
settings.load_profile(PROFILE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs tests on a simulated CUDA device."""
    text = "run tests on a simulated CUDA device, those marked `gpu` and `simulated` among them"
    parser.addoption("--simulated-device", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of the rehearsal without its device."""
    if not config.getoption("--simulated-device"):
        skip = pytest.mark.skip(reason="needs --simulated-device (make rehearse)")
        for item in items:
            if item.get_closest_marker("simulated"):
                item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    """Add the filters of warnings, and log plain tracebacks."""
    if config.getoption("--simulated-device"):
        # Other runs neither import it nor compile its guard.
        from tests.support.device.plugin import SimulatedDevicePlugin  # noqa: PLC0415

        config.pluginmanager.register(SimulatedDevicePlugin())
    for line in WARNING_FILTERS:
        config.addinivalue_line("filterwarnings", line)
    reset_logs()


def pytest_collection_finish() -> None:
    """Read files that a test has just written at once; wait for servers of a loaded machine.

    See `QUIET_S` and `FIRST_START_S`.
    """
    directory = sys.modules.get("loradock.engine.adapters.directory")
    if directory is not None:
        directory.QUIET_S = 0.0  # type: ignore[attr-defined]
    sockets = sys.modules.get("loradock.client.sockets")
    if sockets is not None:
        sockets.FIRST_START_S = HANG_S  # type: ignore[attr-defined]
