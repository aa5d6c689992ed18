"""Files that are rewritten in place: what is read is one version, never a mixture of two."""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from loradock.engine.adapters import LoRAModel, PEFTHelper, directory, read_adapter
from loradock.engine.adapters.directory import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.errors import Conflict
from tests.support.engine.adapter_examples import CONFIG, LORA_CONFIG, MODULES, tensors, write
from tests.support.seeds import fresh_seed

QUIET_S = 1.0
BLOCKS = 6
LOADS = 300
MIXTURE, REFUSED = "mixture", "refused"


def content(version: int) -> bytes:
    return save({name: torch.full_like(one, version) for name, one in tensors().items()})


def read_as_an_engine(path: Path) -> LoRAModel:
    return read_adapter(path.name, [path.parent], AdapterTarget(MODULES, LORA_CONFIG)).model


def read_as_a_program(path: Path) -> LoRAModel:
    helper = PEFTHelper.from_local_dir(str(path))
    return LoRAModel.from_local_checkpoint(str(path), {"q_proj", "v_proj"}, helper)


def load(path: Path, read: Callable[[Path], LoRAModel] = read_as_an_engine) -> str:
    """Return the version that was read, or that the load was refused, or a mixture."""
    try:
        model = read(path)
    except Conflict:
        return REFUSED
    values = {value for one in model.loras.values() for value in one.lora_a.unique().tolist()}
    return str(int(values.pop())) if len(values) == 1 else MIXTURE


class Writer:
    """Rewrites an adapter's weights in place, block after block, one version after another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 1
        self._next = BLOCKS
        write(path, weights=content(self.version))

    @property
    def is_between_blocks(self) -> bool:
        return self._next < BLOCKS

    @property
    def changed_s(self) -> float:
        return (self.path / WEIGHTS_NAME).stat().st_mtime

    def write_block(self) -> None:
        if not self.is_between_blocks:
            self.version, self._next = self.version + 1, 0
        raw = content(self.version)
        size = -(-len(raw) // BLOCKS)
        start = self._next * size
        with (self.path / WEIGHTS_NAME).open("r+b", buffering=0) as file:
            file.seek(start)
            file.write(raw[start : start + size])
        self._next += 1

    def write_block_with_a_new_time(self) -> None:
        """Write the next block so that the file's time differs, as it does after a second."""
        before = (self.path / WEIGHTS_NAME).stat().st_mtime_ns
        self.write_block()
        while (self.path / WEIGHTS_NAME).stat().st_mtime_ns == before:
            self._next -= 1
            self.write_block()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock in place of the real one: times of files are real, and nothing waits."""
    found = SimpleNamespace(time=time.time, sleep=lambda _: None)
    monkeypatch.setattr(directory, "time", found)
    monkeypatch.setattr(directory, "QUIET_S", QUIET_S)
    return found


@pytest.mark.parametrize("read", [read_as_an_engine, read_as_a_program])
def test_no_mixture_is_read_from_a_writer_that_pauses_for_less_than_the_wait(
    read: Callable[[Path], LoRAModel],
    tmp_path: Path,
    clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each load begins between any two blocks; the writer goes on during the wait or the read."""
    draw = random.Random(fresh_seed())
    writer, read_into = Writer(tmp_path / "a"), directory.OpenFile.read_into

    def read_meanwhile(file: directory.OpenFile, buffer: memoryview, start: int) -> None:
        if draw.random() < 0.1:
            writer.write_block_with_a_new_time()
        read_into(file, buffer, start)

    def write_meanwhile(_: float) -> None:
        # A writer that is not at its end has paused for less than this wait.
        for _ in range(draw.randint(writer.is_between_blocks, 2)):
            writer.write_block_with_a_new_time()

    clock.sleep = write_meanwhile
    monkeypatch.setattr(directory.OpenFile, "read_into", read_meanwhile)
    found = Counter[str]()
    for _ in range(LOADS):
        for _ in range(draw.randint(0, BLOCKS)):
            writer.write_block()
        # A program opens the files twice, so few loads would begin and end within a pause.
        is_whole = draw.random() < 0.5
        while is_whole and writer.is_between_blocks:
            writer.write_block()
        before = writer.version
        result = load(writer.path, read)
        found[result] += 1
        assert result != MIXTURE
        assert result == REFUSED or before <= int(result) <= writer.version
    assert 0 < found[REFUSED] < LOADS


def test_files_that_were_written_long_ago_are_read_at_once(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    def fail(_: float) -> None:
        raise AssertionError("it waited")

    writer, clock.sleep = Writer(tmp_path / "a"), fail
    clock.time = lambda: time.time() + QUIET_S
    assert load(writer.path) == "1"


def test_the_wait_is_bounded_for_files_from_the_future(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    """As on a server whose clock is ahead, or after this one was set back."""
    waits: list[float] = []
    writer, clock.sleep = Writer(tmp_path / "a"), waits.append
    clock.time = lambda: time.time() - 3600
    assert load(writer.path) == "1"
    assert waits == [QUIET_S]
    clock.time = lambda: os.stat(writer.path / WEIGHTS_NAME).st_ctime + 0.75
    assert load(writer.path) == "1"
    assert waits[1] == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize("name", [CONFIG_NAME, INDEX_NAME, "adapter_model-2.safetensors"])
def test_every_file_of_the_adapter_is_watched(
    name: str, tmp_path: Path, clock: SimpleNamespace
) -> None:
    path, first = tmp_path / "a", dict(list(tensors().items())[:2])
    others = {key: one for key, one in tensors().items() if key not in first}
    write(path)
    (path / WEIGHTS_NAME).unlink()
    shards = {"adapter_model-1.safetensors": first, "adapter_model-2.safetensors": others}
    for shard, content in shards.items():
        (path / shard).write_bytes(save(content))
    index = {"weight_map": {key: shard for shard, content in shards.items() for key in content}}
    (path / INDEX_NAME).write_text(json.dumps(index))
    assert read_as_an_engine(path).loras
    raw = (path / name).read_bytes()
    before = (path / name).stat().st_mtime_ns

    def rewrite(_: float) -> None:
        while (path / name).stat().st_mtime_ns == before:
            (path / name).write_bytes(raw)

    clock.sleep = rewrite
    with pytest.raises(Conflict, match=f"{name} was changed .* write files elsewhere, rename"):
        read_as_an_engine(path)


def test_a_renamed_directory_is_read_at_once_if_its_files_were_complete(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    """Which is why the error advises it: the files' times are older than the rename."""
    write(tmp_path / "new", CONFIG, content(2))
    clock.time = lambda: time.time() + QUIET_S
    clock.sleep = pytest.fail
    os.rename(tmp_path / "new", tmp_path / "a")
    assert load(tmp_path / "a") == "2"


def test_no_mixture_is_read_from_a_thread_that_rewrites_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real waits; only a writer that was stopped for longer than the wait is no failure."""
    monkeypatch.setattr(directory, "QUIET_S", QUIET_S)
    draw, ended = random.Random(fresh_seed()), threading.Event()
    writer, pauses_s = Writer(tmp_path / "a"), [0.0]

    def rewrite() -> None:
        while not ended.wait(draw.choice((0.0, 0.5, 1.5))):
            writer.write_block()
            while writer.is_between_blocks:
                before = writer.changed_s
                time.sleep(draw.choice((0.0, 0.01, 0.1)))
                writer.write_block()
                pauses_s.append(writer.changed_s - before)

    def load_at_some_time(pause_s: float) -> str:
        time.sleep(pause_s)
        return load(writer.path)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        with ThreadPoolExecutor(60) as readers:
            found = Counter(readers.map(load_at_some_time, [draw.random() for _ in range(240)]))
    finally:
        ended.set()
        thread.join()
    assert not found[MIXTURE] or max(pauses_s) > QUIET_S, found
    assert load(writer.path) == str(writer.version)
