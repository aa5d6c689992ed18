"""Small products stay on one thread, and the number of threads is put back."""

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.threads import THREADED_ROWS, threads_for


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("rows", "threads"), [(0, 1), (1, 1), (THREADED_ROWS - 1, 1), (THREADED_ROWS, 2)]
)
def test_only_products_of_many_rows_are_shared_out(rows: int, threads: int) -> None:
    with threads_for(rows):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_the_number_is_put_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), threads_for(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
