"""What can't be served is refused in one sentence, before a process is started."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from loradock.cli.exit_codes import ExitCode
from loradock.cli.serve import start_checks
from loradock.cli.serve.start_checks import Start, StartRefused, check_start
from loradock.controller.core.limits import Limits
from loradock.controller.log.segments import lock_directory
from loradock.messages.engine_options import EngineOptions, LoRAOptions
from tests.support.parallel.processes import TINY
from tests.support.simulation.command_runs import run

MODEL = TINY / "model"


def start(model: Path = MODEL, roots: tuple[Path, ...] = (), limits: Limits | None = None, **some):
    lora = {name: some.pop(name) for name in LoRAOptions.__dataclass_fields__ if name in some}
    return Start(model, roots, LoRAOptions(**lora), EngineOptions(**some), limits or Limits())


def test_what_can_be_served_passes() -> None:
    check_start(start(roots=(TINY / "adapters",)))
    check_start(start(target_modules=("q_proj", "qkv_proj", "model.layers.0.mlp.up_proj")))
    check_start(start(device="cpu", task="generate", max_lora_rank=64, pin_memory=False))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu"}, "--device gpu is not known; it is auto, cpu, cuda or cuda:NUMBER"),
        ({"device": "cuda:x"}, "--device cuda:x is not known"),
        ({"device": "cpu", "dual_stream": True}, "--dual-stream needs CUDA"),
        ({"device": "cpu", "capture_steps": True}, "--capture-steps needs CUDA"),
        ({"device": "cpu", "pin_memory": True}, "--pin-memory needs CUDA"),
        ({"target_modules": ("q_prj",)}, "--target-module q_prj names no module of the model"),
        (
            {"fully_sharded_loras": True, "expert_parallel": True},
            "--fully-sharded-loras and --expert-parallel exclude each other",
        ),
    ],
)
def test_an_option_that_no_engine_accepts_is_refused(options, text: str) -> None:
    with pytest.raises(StartRefused) as caught:
        check_start(start(**options))
    assert str(caught.value).startswith(text)


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "cuda_devices", lambda: 0)
    with pytest.raises(StartRefused, match="this machine has no CUDA device"):
        check_start(start(device="cuda"))
    monkeypatch.setattr(start_checks, "cuda_devices", lambda: 2)
    check_start(start(device="cuda:1"))
    with pytest.raises(StartRefused, match="has 2 CUDA devices, numbered from 0"):
        check_start(start(device="cuda:2"))
    four = Start(MODEL, tensor_parallel_size=4)
    with pytest.raises(StartRefused, match="--tensor-parallel-size 4: one CUDA device per"):
        check_start(four)


def test_memory_that_the_machine_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "memory_total_bytes", lambda: 2 << 30)
    # Defaults are bounds of which a small machine uses a part.
    check_start(start(device="cpu"))
    for field in ("host_bytes_max", "pinned_bytes_max", "device_bytes_max"):
        with pytest.raises(StartRefused, match="is 5 TiB, and this machine has 2 GiB of memory"):
            check_start(start(device="cpu", limits=Limits(**{field: 5 << 40})))


def test_a_directory_without_a_model_is_explained(tmp_path: Path) -> None:
    def refused(path: Path) -> StartRefused:
        with pytest.raises(StartRefused) as caught:
            check_start(start(path))
        return caught.value

    def refusal(path: Path) -> str:
        return str(refused(path))

    assert refusal(tmp_path / "no").endswith("is not a directory")
    assert "save_pretrained" in refused(tmp_path / "no").hint
    hub = refused(Path("Qwen/Qwen2-0.5B"))
    assert "`hf download Qwen/Qwen2-0.5B --local-dir DIRECTORY`" in hub.hint
    assert "it has no config.json" in refusal(tmp_path)
    assert refusal(TINY / "adapters" / "upper").endswith("its base model is loradock/tiny")
    (tmp_path / "config.json").write_text("[]")
    assert "is not a JSON object" in refusal(tmp_path)
    shutil.copy(MODEL / "config.json", tmp_path)
    assert "has no weights" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "is a pointer of Git LFS" in refusal(tmp_path)
    whole = (MODEL / "model.safetensors").read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 20, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        assert f"is cut off: it declares {len(whole) if size > 20 else ''}" in refusal(tmp_path)
    # A header that no tensor can have is left to the engine.
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % (b"9" * 400)
    foreign = len(header).to_bytes(8, "little") + header
    for data in (foreign, whole):
        (tmp_path / "model.safetensors").write_bytes(data)
        check_start(start(tmp_path))


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\n")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("pytorch_model.bin", pointer),
        ("training_args.bin", pointer),
        ("consolidated.safetensors", pointer),
        ("x.safetensors", Path.mkdir),
        # To open one waits for a writer.
        ("x.bin", os.mkfifo),
        ("x.bin", lambda path: path.symlink_to("nowhere")),
    ],
)
def test_files_that_the_engine_does_not_read_may_be_anything(tmp_path: Path, name, make) -> None:
    shutil.copytree(MODEL, tmp_path / "m")
    make(tmp_path / "m" / name)
    check_start(start(tmp_path / "m", target_modules=("q_proj",)))


def test_weights_that_the_engine_does_not_read_are_refused(tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    shutil.copy(MODEL / "model.safetensors", tmp_path / "pytorch_model.bin")
    with pytest.raises(StartRefused, match="has no weights") as caught:
        check_start(start(tmp_path))
    assert "its .bin files are not read" in caught.value.hint


def write_weights(path: Path, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_a_header_that_can_not_be_read_is_left_to_the_engine(tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    deep = b"[" * 100_000 + b"]" * 100_000
    for header in (b"", b"[]", b"\xff", b'{"a": {"dtype": ' + deep + b"}}"):
        write_weights(tmp_path / "model.safetensors", header)
        check_start(start(tmp_path))


def test_files_without_permission_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(StartRefused, match=r"config\.json can't be read: Permission denied"):
        check_start(start())


def test_an_adapter_root_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"--adapter-root .*/no is not a directory"):
        check_start(start(roots=(tmp_path, tmp_path / "no")))


def test_a_model_in_several_files_needs_all_and_its_modules_are_known(tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    shapes = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    files = {"a.c_attn.weight": "1.safetensors", "b.mlp.weight": "2.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": files})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    for name, file in files.items():
        with pytest.raises(StartRefused, match=f"{file} is missing"):
            check_start(start(tmp_path))
        write_weights(tmp_path / file, json.dumps({name: shapes}).encode())
    check_start(start(tmp_path, target_modules=("c_attn", "mlp")))
    with pytest.raises(StartRefused) as caught:
        check_start(start(tmp_path, target_modules=("q_proj",)))
    assert caught.value.hint == "its modules are c_attn, mlp"


@pytest.mark.parametrize("directory", ["/proc/x", "/dev/null/x"])
def test_a_directory_that_can_not_be_made_is_one_sentence(directory: str) -> None:
    result = run("serve", "--model", str(MODEL), directory=directory)
    assert result.exit_code == ExitCode.UNREACHABLE
    line, hint = result.stderr.splitlines()
    assert line.startswith(f"--dir {directory} can't be used: ")
    assert "loradock --dir DIRECTORY" in hint


def test_a_directory_that_is_served_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    fd = lock_directory(tmp_path / "log")
    try:
        result = run("serve", "--model", str(MODEL), directory=tmp_path)
    finally:
        os.close(fd)
    assert result.exit_code == ExitCode.LOG
    assert f"a server runs in {tmp_path} already (process {os.getpid()})" in result.stderr
