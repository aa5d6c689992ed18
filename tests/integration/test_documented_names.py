"""Every documented name has a place here, which takes the documented arguments in their order."""

import inspect
from pathlib import Path
from typing import Final

import pytest

import controller.client
import engine.adapters.expert_stacks
import engine.adapters.module_paths
import engine.config
import engine.errors
import engine.layers
import engine.manager.request_reader
import engine.models.preparation
import engine.punica
import engine.residency.staging
from controller.shell.diagrams import between_marks
from tests.documented_names import BEGIN, END, SECTIONS, text
from tests.support.documented_name import DocumentedName

DOCUMENT = Path(__file__).parents[2] / "docs" / "from-vllm.md"
NAMES = [name for names in SECTIONS.values() for name in names]
MODULES: Final = {
    module.__name__: module
    for module in (
        *(controller.client, engine.adapters, engine.adapters.expert_stacks, engine.config),
        engine.adapters.module_paths,
        *(engine.errors, engine.layers, engine.manager, engine.manager.request_reader),
        *(engine.models.preparation, engine.punica, engine.residency.staging),
    )
}


def found_at(place: str) -> object:
    module, _, path = place.partition(":")
    found: object = MODULES[module]
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", NAMES, ids=lambda one: one.name)
def test_a_documented_name_takes_its_documented_arguments(name: DocumentedName) -> None:
    found = found_at(name.place)
    if not name.arguments:
        return
    parameters = inspect.signature(found).parameters
    taken = [one for one in parameters if one != "self"]
    positional, _, keywords = name.arguments.partition(" * ")
    assert taken[: len(positional.split())] == positional.split()
    assert set(keywords.split()) <= set(taken)


def test_the_document_is_up_to_date() -> None:
    document = DOCUMENT.read_text()
    written = between_marks(document, BEGIN, END, text())
    assert written == document, "run python -m tests.documented_names docs/from-vllm.md"


def test_every_difference_is_a_sentence_and_no_name_is_listed_twice() -> None:
    assert len({name.name for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert not name.difference or name.difference.endswith("."), name.name
