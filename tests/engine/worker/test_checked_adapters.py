"""A load takes what its check has read: no byte is read twice, at any size."""

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from loradock.engine.adapters import LoadedAdapter
from loradock.engine.adapters.directory import CONFIG_NAME, WEIGHTS_NAME
from loradock.engine.residency.host_adapters import CheckedAdapters
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED
from tests.support.engine.adapter_examples import read, write
from tests.support.engine.engine_bench import EngineBench, failure

pytest_plugins = ("tests.support.engine.engine_fixtures",)

MIB = 1 << 20
SOURCE = {"adapter_id": 1, "adapter": "a", "path": ""}


@pytest.fixture
def root(adapter_root: Path, tmp_path: Path) -> Path:
    """A root with one adapter, `a`, whose files may be changed."""
    (tmp_path / "a").mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        (tmp_path / "a" / name).write_bytes((adapter_root / "mlp" / name).read_bytes())
    return tmp_path


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench], root: Path) -> EngineBench:
    return make_engine(adapter_roots=(root,))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that were read through the operating system, by file."""
    found, preadv = Counter[str](), os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        found[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    return found


def check(bench: EngineBench) -> rp.AdapterChecked:
    checked = bench.do(cm.CheckAdapter, **SOURCE)
    assert isinstance(checked, rp.AdapterChecked), checked
    return checked


def load(bench: EngineBench, checked: rp.AdapterChecked) -> rp.Report:
    return bench.do(cm.LoadWeights, **SOURCE, fingerprint=checked.fingerprint)


def sizes(directory: Path) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in (CONFIG_NAME, WEIGHTS_NAME)}


def pad(weights: Path, size_bytes: int) -> None:
    """Add a copy of an embedding that this model does not have, to make a file large."""
    tensors = load_file(weights)
    rows = torch.zeros(size_bytes // 2048, 1024, dtype=torch.bfloat16)
    save_file({**tensors, "base_model.model.other.embed_tokens.weight": rows}, weights)


@pytest.mark.parametrize("size_bytes", [0, 80 * MIB], ids=["small", "large"])
def test_a_check_and_its_load_read_every_byte_once(
    bench: EngineBench, root: Path, bytes_read: Counter[str], size_bytes: int
) -> None:
    if size_bytes:
        pad(root / "a" / WEIGHTS_NAME, size_bytes)
    checked = check(bench)
    assert bytes_read == sizes(root / "a")
    assert load(bench, checked) == rp.WeightsLoaded(bench.op)
    assert bytes_read == sizes(root / "a")
    # Nothing but the loaded adapter has the weights now.
    assert bench.engine.residency.checked.size_bytes == 0
    assert bench.engine.residency.host_use() == (checked.host_bytes, 0)
    # A reload after an eviction reads the files again.
    assert isinstance(bench.do(cm.DropWeights, adapter_id=1), rp.WeightsDropped)
    assert load(bench, checked) == rp.WeightsLoaded(bench.op)
    assert bytes_read[CONFIG_NAME] == 2 * sizes(root / "a")[CONFIG_NAME]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_the_checked_bytes_are_loaded_if_the_files_are_rewritten_in_between(
    make_engine: Callable[..., EngineBench], root: Path, bytes_read: Counter[str], suffix: str
) -> None:
    bench, weights = make_engine(adapter_roots=(root,), allow_pickled_weights=True), root / "a"
    tensors = load_file(weights / WEIGHTS_NAME)
    if suffix == "bin":
        (weights / WEIGHTS_NAME).unlink()
        torch.save(tensors, weights / "adapter_model.bin")
    checked = check(bench)
    size_bytes = (weights / f"adapter_model.{suffix}").stat().st_size
    assert bytes_read[f"adapter_model.{suffix}"] == size_bytes
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(changed, weights / WEIGHTS_NAME)
    assert load(bench, checked) == rp.WeightsLoaded(bench.op)
    loras = bench.engine.residency.host_adapters[1].weights.loras
    name, lora = next(iter(loras.items()))
    assert torch.equal(lora.lora_a, tensors[f"base_model.model.{name}.lora_A.weight"])
    # After an eviction the files are those of another version, which is refused.
    bench.do(cm.DropWeights, adapter_id=1)
    failure(load(bench, checked), ErrorCode.CONFLICT, "load them with replace")


def test_a_load_takes_its_own_check_once(bench: EngineBench, bytes_read: Counter[str]) -> None:
    checked = check(bench)
    other = bench.do(cm.LoadWeights, **SOURCE | {"adapter_id": 2}, fingerprint=checked.fingerprint)
    assert isinstance(other, rp.WeightsLoaded)
    once = bytes_read[CONFIG_NAME] // 2
    assert load(bench, checked) == rp.WeightsLoaded(bench.op)
    assert bytes_read[CONFIG_NAME] == 2 * once
    first, second = (bench.engine.residency.host_adapters[key].weights for key in (1, 2))
    assert first is not second


def test_a_load_with_another_fingerprint_than_its_check_is_refused(bench: EngineBench) -> None:
    checked = check(bench)
    wrong = bench.do(cm.LoadWeights, **SOURCE, fingerprint="f" * 32)
    failure(wrong, ErrorCode.CONFLICT, checked.fingerprint)


def test_a_check_that_waits_for_too_long_is_dropped_and_its_load_reads_again(
    bench: EngineBench, bytes_read: Counter[str]
) -> None:
    checked = check(bench)
    waiting = bench.engine.residency.checked
    bench.engine.poll(100.0)
    bench.engine.poll(109.0)
    assert waiting.size_bytes == checked.host_bytes
    with capture_logs() as logs:
        bench.engine.poll(1e9)
    [line] = logs
    assert (line["adapter"], line["bound"]) == ("a", "10 seconds")
    assert waiting.size_bytes == 0
    assert load(bench, checked) == rp.WeightsLoaded(bench.op)
    assert bytes_read[CONFIG_NAME] % 2 == 0
    assert bench.adapters()[1].state == CPU_CACHED


def example(tmp_path: Path) -> tuple[LoadedAdapter, int]:
    loaded = read(write(tmp_path / "a"))
    return loaded, loaded.host_bytes


def add(checked: CheckedAdapters, adapter_id: int, loaded: LoadedAdapter) -> None:
    checked.add(cm.CheckAdapter(adapter_id, adapter_id, str(adapter_id), ""), loaded)


def test_the_oldest_checks_have_no_room_beside_the_newest(tmp_path: Path) -> None:
    loaded, size_bytes = example(tmp_path)
    checked = CheckedAdapters(size_bytes_max=2 * size_bytes)
    with capture_logs() as logs:
        for adapter_id in range(1, 6):
            add(checked, adapter_id, loaded)
            assert checked.size_bytes <= 3 * size_bytes
    assert [line["adapter"] for line in logs] == ["1", "2"]
    assert [checked.take(adapter_id) is None for adapter_id in range(1, 6)] == [
        *(True, True),
        *(False, False, False),
    ]
    assert checked.size_bytes == 0
    # An adapter that is larger than the bound waits alone.
    checked = CheckedAdapters(size_bytes_max=0)
    add(checked, 1, loaded)
    assert checked.take(1) is loaded


def test_what_leaves_is_freed(tmp_path: Path) -> None:
    checked = CheckedAdapters(wait_s_max=1.0)

    def expire() -> None:
        checked.expire(0.0)
        checked.expire(2.0)

    for leave in (lambda: checked.take(1), checked.clear, expire):
        loaded, _ = example(tmp_path)
        model = weakref.ref(loaded.model)
        add(checked, 1, loaded)
        del loaded
        leave()
        gc.collect()
        assert model() is None
        assert checked.size_bytes == 0
