"""Error texts for adapters of other models, and for settings that are not served."""

from pathlib import Path
from typing import Any

import pytest
import torch

from loradock.engine.adapters import read_adapter
from loradock.engine.adapters.problems import Problems
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import DEFAULT_BOUNDS
from loradock.engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from loradock.engine.layout import ModuleKind, ModuleShape
from loradock.messages.errors import DETAIL_CHARACTERS_MAX, DETAILS_MAX, ErrorCode
from loradock.messages.reports import OperationFailed
from loradock.messages.wire import REPORTS
from tests.support.engine.adapter_examples import (
    CONFIG,
    LORA_CONFIG,
    MODULES,
    Q,
    V,
    key,
    read,
    tensors,
    write,
)

OTHER_MODEL = tensors(q_A=torch.ones(4, 96), v_A=torch.ones(4, 96))
EMBEDDING = "model.embed_tokens"


def refusal(directory: Path, weights: dict[str, torch.Tensor], **fields: Any) -> str:
    with pytest.raises((AdapterDoesNotFit, AdapterConfigRefused)) as caught:
        read(write(directory, {**CONFIG, **fields}, weights))
    return str(caught.value)


def test_an_adapter_of_another_model_is_one_problem_with_the_name_of_that_model(
    tmp_path: Path,
) -> None:
    first = f"{Q} has A [4, 96] and B [16, 4]; in this model it has 16 inputs and 16 outputs"
    text = refusal(tmp_path / "a", OTHER_MODEL, base_model_name_or_path="other/model")
    assert text == (
        "adapter 'sample': trained for a model of other sizes (its base_model_name_or_path is "
        f"'other/model'): 2 of its 2 modules differ; {first}"
    )
    for name in ({}, {"base_model_name_or_path": 7}, {"base_model_name_or_path": None}):
        text = refusal(tmp_path / "a", OTHER_MODEL, **name)
        assert text.endswith(
            f"trained for a model of other sizes: 2 of its 2 modules differ; {first}"
        )


def test_the_details_have_each_finding_where_the_text_leaves_any_out(tmp_path: Path) -> None:
    with pytest.raises(AdapterDoesNotFit) as caught:
        read(write(tmp_path / "a", weights=OTHER_MODEL))
    found = [line.partition(" has ")[0] for line in caught.value.details]
    assert found == [Q, V]
    assert all("in this model it has 16 inputs" in line for line in caught.value.details)
    # One finding is the text itself.
    with pytest.raises(AdapterDoesNotFit) as caught:
        read(write(tmp_path / "b", weights=tensors(q_A=torch.ones(4, 96))))
    assert caught.value.details == ()


def test_a_text_has_the_first_findings_and_the_number_of_the_others(tmp_path: Path) -> None:
    names = [f"{Q[:-6]}{letter}_proj" for letter in "abcdef"]
    problems = Problems(DEFAULT_BOUNDS.problems_max)
    for name in names:
        problems.add(AdapterDoesNotFit, f"{name} is wrong")
    error = problems.error()
    assert str(error).endswith("; and 2 more")
    assert len(error.details) == len(names)


def test_targets_whose_tensors_are_refused_are_not_reported_as_absent(tmp_path: Path) -> None:
    ranks = refusal(tmp_path / "a", tensors(), r=2)
    assert "the config specifies rank 2" in ranks
    assert "without a tensor" not in ranks
    integers = {name: one.to(torch.int8) for name, one in tensors().items()}
    kinds = refusal(tmp_path / "b", integers)
    assert "must have a floating dtype" in kinds
    assert "without a tensor" not in kinds


def test_details_are_bounded_in_number_and_length() -> None:
    problems = Problems(shown_max=2)
    names = [f"{'n' * 1000}{number}" for number in range(DETAILS_MAX + 10)]
    problems.add_each(AdapterDoesNotFit, "unexpected tensors", names)
    details = problems.error().details
    assert len(details) == DETAILS_MAX
    assert details[-1] == "and 11 more"
    assert max(map(len, details)) <= DETAIL_CHARACTERS_MAX
    report = OperationFailed(1, ErrorCode.DOES_NOT_FIT, "text", details)
    assert REPORTS.decode(REPORTS.encode(report)).message == report


def test_one_module_of_another_size_is_named_alone(tmp_path: Path) -> None:
    text = refusal(tmp_path / "a", tensors(q_A=torch.ones(4, 96)))
    assert text == (
        f"adapter 'sample': {Q} has A [4, 96] and B [16, 4]; in this model it has 16 inputs and 16 "
        "outputs"
    )


def test_dora_is_refused_where_no_base_weight_can_be_read(tmp_path: Path) -> None:
    magnitude = {key(Q, "A").replace("lora_A", "lora_magnitude_vector"): torch.ones(16)}
    text = refusal(tmp_path / "a", tensors() | magnitude, use_dora=True)
    assert "is a magnitude of a layer for which none is served; they are for linear layers" in text


def test_a_whole_module_that_can_not_be_replaced_is_one_problem(tmp_path: Path) -> None:
    modules = MODULES | {EMBEDDING: ModuleShape(EMBEDDING, 50, 16, 3, kind=ModuleKind.EMBEDDING)}
    weights = tensors() | {f"base_model.model.{EMBEDDING}.weight": torch.ones(50, 16)}
    path = write(tmp_path / "a", {**CONFIG, "modules_to_save": ["embed_tokens"]}, weights)
    with pytest.raises(AdapterDoesNotFit) as caught:
        read_adapter(path.name, [tmp_path], AdapterTarget(modules, LORA_CONFIG))
    assert str(caught.value) == (
        f"adapter 'a': {EMBEDDING} is of kind embedding, which an adapter changes by "
        "lora_embedding_A and lora_embedding_B"
    )
