"""Host memory: large tensors are in huge pages where the system has them."""

import sys
from pathlib import Path

import pytest
import torch

from loradock.engine import memory
from loradock.engine.errors import HostOutOfMemory
from loradock.engine.memory import HUGE_PAGE_BYTES, allocate_host

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()


def flags_at(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that contains an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "VmFlags:":
            return rest
    raise LookupError(hex(address))


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="the kernel has no transparent huge pages")
def test_large_memory_is_in_huge_pages_and_no_memory_around_it() -> None:
    large = allocate_host((40 * HUGE_PAGE_BYTES,), torch.uint8)
    assert "hg" in flags_at(large.data_ptr() + large.nbytes // 2)
    advised: list[tuple[int, int]] = []

    class Recorded:
        @staticmethod
        def madvise(start: object, length: object, _: int) -> int:
            advised.append((start.value, length.value))
            return -1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_LIBC", Recorded)
        for size in (1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5, 7 * HUGE_PAGE_BYTES):
            tensor = allocate_host((size,), torch.uint8)
            assert tensor.fill_(7).min() == 7
            for start, length in advised:
                assert start % HUGE_PAGE_BYTES == length % HUGE_PAGE_BYTES == 0
                assert tensor.data_ptr() <= start
                assert start + length <= tensor.data_ptr() + size
            if size >= 3 * HUGE_PAGE_BYTES:
                assert advised
            advised.clear()


def test_a_lack_of_memory_names_the_bytes() -> None:
    with pytest.raises(HostOutOfMemory, match=f"{sys.maxsize // 2} bytes of pageable"):
        allocate_host((sys.maxsize // 2,), torch.uint8)
