"""Fixtures for the tests of the gateway."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.gateway.served import HERMES_TEMPLATE, Served, model_directory, serve_gateway
from tests.support.simulation.standin_controller import StandIn
from tests.support.waiting import HANG_S


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway with all endpoints, in front of a stand-in."""
    directory = tmp_path_factory.mktemp("gw")
    model = model_directory(directory)
    with (
        StandIn(directory) as controller,
        serve_gateway(controller, model=str(model), allow_runtime_lora_updating=True) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway whose chat template shows the format of Hermes."""
    directory = tmp_path_factory.mktemp("gw")
    model = model_directory(directory, HERMES_TEMPLATE)
    with StandIn(directory) as controller, serve_gateway(controller, model=str(model)) as gateway:
        yield gateway


@pytest.fixture
def client(hermes: Served) -> Iterator[openai.OpenAI]:
    """The `openai` client of this gateway."""
    url = f"{hermes.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", timeout=HANG_S, max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _usual_answers(request: Any) -> Iterator[None]:
    """Make the stand-in of a module answer as usual again after each test."""
    used = {"served", "hermes"}.intersection(request.fixturenames)
    if not used:
        yield
        return
    controller = request.getfixturevalue(used.pop()).controller
    adapters, answers = dict(controller.adapters), dict(controller.answers)
    output = controller.output
    yield
    controller.adapters, controller.answers = adapters, answers
    controller.output = output
    controller.received.clear()
