"""Error texts for missing files: they state what was found and suggest only paths that load."""

import re
from pathlib import Path

import pytest

from loradock.engine.adapters import read_adapter
from loradock.engine.adapters.directory import CONFIG_NAME, WEIGHTS_NAME
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.errors import AdapterNotFound
from tests.support.engine.adapter_examples import LORA_CONFIG, MODULES, write


def error_of(path: str, *roots: Path) -> str:
    with pytest.raises(AdapterNotFound) as caught:
        read_adapter(path, roots, AdapterTarget(MODULES, LORA_CONFIG))
    return str(caught.value)


def suggested(text: str) -> list[str]:
    """Return the paths that a text suggests to use."""
    return re.findall(r"'([^']+)'", text.partition("use ")[2])


def check_suggestions(text: str, *roots: Path) -> None:
    paths = suggested(text)
    assert paths
    for path in paths:
        assert read_adapter(path, roots, AdapterTarget(MODULES, LORA_CONFIG)).model.loras


def test_a_path_that_repeats_the_root_is_corrected(tmp_path: Path) -> None:
    root, other = tmp_path / "adapters", tmp_path / "other"
    other.mkdir()
    write(root / "team" / "qv")
    text = error_of("adapters/team/qv", other, root)
    assert f"no directory 'adapters/team/qv' below the adapter roots {other}, {root}; " in text
    assert suggested(text) == ["team/qv"]
    check_suggestions(text, other, root)


@pytest.mark.parametrize("path", ["team/vq", "vq", "x/y/w", "adapters/link"])
def test_nothing_is_suggested_where_nothing_is_found(tmp_path: Path, path: str) -> None:
    write(tmp_path / "root" / "team" / "qv")
    write(tmp_path / "outside" / "qv")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside" / "qv")
    text = error_of(path, tmp_path / "root")
    assert text.endswith(f"no directory {path!r} below the adapter root {tmp_path / 'root'}")


def test_an_absolute_path_is_not_shortened(tmp_path: Path) -> None:
    write(tmp_path / "root" / "qv")
    text = error_of(str(tmp_path / "root" / "root" / "qv"), tmp_path / "root")
    assert suggested(text) == []


def test_a_root_that_can_not_be_opened_is_named_unless_another_has_the_adapter(
    tmp_path: Path,
) -> None:
    write(tmp_path / "root" / "qv")
    gone, root = tmp_path / "gone", tmp_path / "root"
    target = AdapterTarget(MODULES, LORA_CONFIG)
    assert read_adapter("qv", [gone, root], target).model.loras
    assert f"adapter root {gone} can't be opened" in error_of("vq", gone, root)


def test_a_directory_of_checkpoints_suggests_them(tmp_path: Path) -> None:
    for step in (20, 100):
        write(tmp_path / "ckpt" / f"checkpoint-{step}")
    (tmp_path / "ckpt" / "linked").symlink_to(tmp_path / "ckpt" / "checkpoint-20")
    (tmp_path / "ckpt" / "runs").mkdir()
    text = error_of("ckpt", tmp_path)
    assert f"'ckpt' has no {CONFIG_NAME}, but 2 directories below it have one: use the path" in text
    assert suggested(text) == ["ckpt/checkpoint-20", "ckpt/checkpoint-100"]
    check_suggestions(text, tmp_path)


def test_one_checkpoint_is_suggested_for_an_absolute_path_too(tmp_path: Path) -> None:
    write(tmp_path / "ckpt" / "checkpoint-100")
    text = error_of(f"{tmp_path}/ckpt/", tmp_path)
    assert suggested(text) == [f"{tmp_path}/ckpt/checkpoint-100"]
    check_suggestions(text, tmp_path)


def test_an_empty_directory_and_one_without_an_adapter_have_their_own_words(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    assert "'empty' is an empty directory; copy" in error_of("empty", tmp_path)
    (tmp_path / "empty" / "README.md").touch()
    assert f"'empty' has no {CONFIG_NAME}; save the adapter with" in error_of("empty", tmp_path)


def test_a_merged_model_is_recognised(tmp_path: Path) -> None:
    directory = write(tmp_path / "merged")
    (directory / CONFIG_NAME).rename(directory / "config.json")
    assert f"'merged' has {WEIGHTS_NAME} but no {CONFIG_NAME}; copy" in error_of("merged", tmp_path)
    (directory / WEIGHTS_NAME).rename(directory / "model.safetensors")
    text = error_of("merged", tmp_path)
    assert "'merged' has config.json and model.safetensors: a whole model, not an adapter" in text
    assert "merge_and_unload()" in text
    assert "--model" in text


def test_missing_weights_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "half")
    (directory / WEIGHTS_NAME).unlink()
    assert f"'half' has {CONFIG_NAME} but no {WEIGHTS_NAME}" in error_of("half", tmp_path)


@pytest.mark.parametrize("revisions", [["0b1c"], ["0b1c", "77fe"]])
def test_a_repository_of_the_hugging_face_cache_suggests_its_revisions(
    revisions: list[str], tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    for number, revision in enumerate(revisions):
        snapshot = write(repository / "snapshots" / revision)
        for file in list(snapshot.iterdir()):
            blob = repository / "blobs" / f"{number}{file.name}"
            blob.parent.mkdir(exist_ok=True)
            file.rename(blob)
            file.symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revisions[0])
    for path in ("hub/models--org--name", str(repository)):
        text = error_of(path, tmp_path)
        assert suggested(text) == [f"{path}/snapshots/{revision}" for revision in revisions]
        check_suggestions(text, tmp_path)


def test_snapshots_elsewhere_are_not_searched(tmp_path: Path) -> None:
    write(tmp_path / "outside" / "0b1c")
    (tmp_path / "root" / "models--org--name").mkdir(parents=True)
    (tmp_path / "root" / "models--org--name" / "snapshots").symlink_to(tmp_path / "outside")
    assert suggested(error_of("models--org--name", tmp_path / "root")) == []
