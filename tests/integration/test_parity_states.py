"""Rows of models with other states than keys and values are PEFT's: one of each kind.

`make parity` compares all architectures.
"""

from pathlib import Path

import pytest

from tests.support.models.causal_parity import ERROR_MAX, Reference, judge_manager, judge_server

KINDS = {"lfm2": "together", "minimax": "single"}
"""A convolution's state and keys decoded together; a cache that only the model itself knows."""


@pytest.mark.parametrize("model_type", KINDS)
def test_rows_with_states_match_peft_in_process_and_served(model_type: str, tmp_path: Path) -> None:
    reference, modes = Reference(model_type, tmp_path), []
    assert judge_manager(model_type, tmp_path, reference) < ERROR_MAX
    assert judge_server(model_type, tmp_path, reference, modes) < ERROR_MAX
    assert modes == [KINDS[model_type]]
