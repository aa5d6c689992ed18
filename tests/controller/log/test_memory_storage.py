"""The storage of simulations: like the disk while nothing fails, and as lossy as one that fails."""

import errno
from pathlib import Path
from random import Random

import pytest

from loradock.controller.log.storage import DISK, Storage
from tests.support.simulation.memory_storage import Faults, MemoryStorage

DIRECTORY = Path("/log")
A, B, DRAFT = DIRECTORY / "a", DIRECTORY / "b", DIRECTORY / "draft"


@pytest.fixture
def storage() -> MemoryStorage:
    made = MemoryStorage()
    made.make_directory(DIRECTORY)
    return made


def write_durably(storage: Storage, path: Path, data: bytes) -> int:
    fd = storage.create(path)
    assert storage.write(fd, data) == len(data)
    storage.sync(fd)
    storage.sync_directory(path.parent)
    return fd


def content(storage: Storage, directory: Path) -> dict[str, bytes]:
    return {name: storage.read(directory / name) for name in sorted(storage.names(directory))}


def use(storage: Storage, directory: Path) -> list[object]:
    """Return what the operations of a log lead to."""
    storage.make_directory(directory)
    seen: list[object] = [storage.is_directory(directory), storage.is_directory(directory / "no")]
    fd = storage.create(directory / "draft")
    seen.append(storage.write(fd, b"abcdef"))
    storage.rename(directory / "draft", directory / "a")
    storage.cut(fd, 4)
    seen.append(storage.write(fd, b"xy"))
    storage.close(fd)
    fd = storage.open_end(directory / "a")
    storage.write(fd, b"z")
    storage.sync_data(fd)
    seen += [storage.size_bytes(directory / "a"), storage.read(directory / "a", 2, 3)]
    seen += [storage.read(directory / "a", 99), storage.read(directory / "a", 2)]
    storage.close(storage.create(directory / "b"))
    storage.rename(directory / "a", directory / "b")
    seen.append(content(storage, directory))
    storage.remove(directory / "b")
    lock = storage.open_directory(directory)
    storage.lock(lock)
    other = storage.open_directory(directory)
    with pytest.raises(BlockingIOError):
        storage.lock(other)
    storage.close(lock)
    storage.lock(other)
    storage.close(other)
    with pytest.raises(FileNotFoundError):
        storage.read(directory / "b")
    return [*seen, content(storage, directory)]


def test_it_does_what_the_disk_does(tmp_path: Path) -> None:
    assert use(MemoryStorage(), DIRECTORY) == use(DISK, tmp_path / "log")


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_of_power_keeps_what_was_synced_and_a_prefix_of_the_rest(seed: int) -> None:
    storage = MemoryStorage(Random(seed))
    storage.make_directory(DIRECTORY)
    fd = write_durably(storage, A, b"synced ")
    for part in (b"one ", b"two ", b"three"):
        storage.write(fd, part)
    assert storage.unsynced_bytes(A) == 13
    storage.lose_power()
    found = storage.read(A)
    assert found.startswith(b"synced ")
    assert b"synced one two three".startswith(found)
    with pytest.raises(OSError, match="descriptor"):
        storage.write(fd, b"x")


def test_a_loss_of_power_can_lose_everything_or_nothing_that_is_unsynced() -> None:
    sizes = set()
    for seed in range(200):
        storage = MemoryStorage(Random(seed))
        storage.make_directory(DIRECTORY)
        fd = write_durably(storage, A, b"")
        storage.write(fd, b"12345")
        storage.lose_power()
        sizes.add(storage.size_bytes(A))
    assert sizes == {0, 1, 2, 3, 4, 5}


def test_a_name_is_durable_after_a_sync_of_its_directory_alone() -> None:
    seen = set()
    for seed in range(100):
        storage = MemoryStorage(Random(seed))
        storage.make_directory(DIRECTORY)
        write_durably(storage, A, b"old")
        fd = storage.create(DRAFT)
        storage.write(fd, b"new")
        storage.sync(fd)
        storage.rename(DRAFT, A)
        storage.lose_power()
        seen.add(tuple(sorted(content(storage, DIRECTORY).items())))
    assert seen == {(("a", b"old"),), (("a", b"old"), ("draft", b"new")), (("a", b"new"),)}


def test_a_failed_sync_loses_what_the_next_one_claims(storage: MemoryStorage) -> None:
    fd = write_durably(storage, A, b"first")
    storage.write(fd, b"lost")
    storage.fail_call(len(storage.calls))
    with pytest.raises(OSError, match="Input/output"):
        storage.sync_data(fd)
    storage.write(fd, b"next")
    storage.sync_data(fd)
    assert storage.read(A) == b"firstlostnext"
    storage.lose_power()
    assert storage.read(A) == b"first\x00\x00\x00\x00next"


def test_holes_and_flips_change_unsynced_bytes_only() -> None:
    changed = 0
    for seed in range(50):
        storage = MemoryStorage(Random(seed), Faults(holes=0.5, flips=0.5))
        storage.make_directory(DIRECTORY)
        fd = write_durably(storage, A, b"s" * 1000)
        storage.write(fd, b"u" * 3000)
        storage.lose_power()
        found = storage.read(A)
        assert found[:1000] == b"s" * 1000
        changed += set(found[1000:]) > {ord("u")}
    assert changed > 10


def test_a_full_disk_takes_what_fits() -> None:
    storage = MemoryStorage(faults=Faults(bytes_max=10))
    storage.make_directory(DIRECTORY)
    fd = storage.create(A)
    assert storage.write(fd, b"123456789012") == 10
    for full in (lambda: storage.write(fd, b"x"), lambda: storage.create(B)):
        with pytest.raises(OSError, match="space") as caught:
            full()
        assert caught.value.errno == errno.ENOSPC
    storage.cut(fd, 4)
    assert storage.write(fd, b"xy") == 2


def test_a_crash_keeps_files_and_ends_locks(storage: MemoryStorage) -> None:
    fd = storage.create(A)
    storage.write(fd, b"abc")
    lock = storage.open_directory(DIRECTORY)
    storage.lock(lock)
    storage.crash()
    storage.lock(storage.open_directory(DIRECTORY))
    assert storage.read(A) == b"abc"
    storage.flip(A, 1)
    assert storage.read(A) == b"acc"


def test_one_seed_leads_to_one_run() -> None:
    def run(seed: int) -> list[bytes]:
        storage = MemoryStorage(Random(seed), Faults(0.2, 0.2, 0.3, 0.3))
        storage.make_directory(DIRECTORY)
        found = []
        for number in range(40):
            fd = storage.create(DIRECTORY / str(number % 3))
            try:
                storage.write(fd, b"x" * 2000)
                storage.sync(fd)
                storage.sync_directory(DIRECTORY)
            except OSError:
                storage.lose_power()
            found += content(storage, DIRECTORY).values()
        return found

    assert run(7) == run(7)
    assert run(7) != run(8)
