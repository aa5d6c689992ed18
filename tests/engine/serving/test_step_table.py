"""A step's numbers arrive unchanged, each part at the alignment that kernels are compiled for."""

import pytest
import torch

from loradock.engine.serving.step_table import StepTable

CPU = torch.device("cpu")


@pytest.mark.parametrize("words", [1, 64], ids=["grows", "fits"])
def test_each_part_is_unchanged_and_starts_at_16_bytes(words: int) -> None:
    table = StepTable(CPU, words)
    for lengths in ((3, 1, 2, 5), (0, 1, 7), (4,)):
        parts = [torch.arange(number, number + length) for number, length in enumerate(lengths)]
        parts.append(torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64))
        sent = table.send(parts)
        assert [one.data_ptr() % 16 for one in sent] == [0] * len(sent)
        for one, part in zip(sent, parts, strict=True):
            assert one.dtype == part.dtype
            assert one.tolist() == part.tolist()
