"""Links below the adapter roots: followed to places below a root, at any moment to no other."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.directory import CONFIG_NAME, WEIGHTS_NAME
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.errors import AdapterNotFound, Conflict, PathNotAllowed
from loradock.processes import safe_open
from tests.support.engine.adapter_examples import LORA_CONFIG, MODULES, Q, tensors, write

FILES = (CONFIG_NAME, WEIGHTS_NAME)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with an adapter; another adapter, with other weights, is outside."""
    write(tmp_path / "root" / "inside")
    write(tmp_path / "outside", weights={n: t + 1 for n, t in tensors().items()})
    return tmp_path / "root"


def read_at(path: str, *roots: Path) -> LoadedAdapter:
    return read_adapter(path, roots, AdapterTarget(MODULES, LORA_CONFIG))


def link(path: Path, target: str | Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def hub_cache(root: Path) -> str:
    """The cache of Hugging Face: names in a snapshot link to blobs."""
    model = root / "models--team--adapter"
    (model / "blobs").mkdir(parents=True)
    for name in FILES:
        shutil.copy(root / "inside" / name, model / "blobs" / f"hash-of-{name}")
        link(model / "snapshots" / "abc" / name, f"../../blobs/hash-of-{name}")
    return "models--team--adapter/snapshots/abc"


def mount(root: Path) -> str:
    """A mount of Kubernetes: names link to `..data`, which links to a dated directory."""
    shutil.copytree(root / "inside", root / "mount" / "..2026_01")
    link(root / "mount" / "..data", "..2026_01")
    for name in FILES:
        link(root / "mount" / name, f"..data/{name}")
    return "mount"


def linked_directory(root: Path) -> str:
    link(root / "a" / "b", "../inside")
    return "a/b"


def chain(root: Path) -> str:
    link(root / "last", root / "inside")
    link(root / "first", "last")
    return "first"


def out_and_back(root: Path) -> str:
    link(root / "back", "../outside/../root/inside")
    return "back"


@pytest.mark.parametrize("layout", [hub_cache, mount, linked_directory, chain, out_and_back])
def test_a_link_to_a_place_below_a_root_is_followed(
    root: Path, layout: Callable[[Path], str]
) -> None:
    path = layout(root)
    expected = read_at("inside", root).fingerprint
    assert read_at(path, root).fingerprint == expected
    # A process without roots allows every place.
    assert read_at(str(root / path), Path("/")).fingerprint == expected


def test_a_link_to_another_root_is_followed(root: Path) -> None:
    link(root / "other", "../outside")
    with pytest.raises(PathNotAllowed, match="out of the adapter roots"):
        read_at("other", root)
    assert read_at("other", root, root.parent / "outside").model.loras


def directory_with(root: Path, name: str, target: str | Path) -> str:
    """An adapter one of whose names is a link."""
    shutil.copytree(root / "inside", root / "bad")
    (root / "bad" / name).unlink()
    link(root / "bad" / name, target)
    return "bad"


HOSTILE: dict[str, Callable[[Path], str | Path]] = {
    "absolute": lambda root: root.parent / "outside" / WEIGHTS_NAME,
    "relative": lambda root: f"../../outside/{WEIGHTS_NAME}",
    "like a root": lambda root: write(Path(f"{root}-evil")) / WEIGHTS_NAME,
    "through a link": lambda root: link(root / "via", "../outside") / WEIGHTS_NAME,
    "through a chain": lambda root: link(
        root / "x", link(root / "y", "../outside/" + WEIGHTS_NAME)
    ),
    "another process's root": lambda root: f"/proc/self/root{root.parent}/outside/{WEIGHTS_NAME}",
    "working directory": lambda root: "/proc/self/cwd/pyproject.toml",
    "device": lambda root: "/dev/zero",
    "system file": lambda root: "/etc/hostname",
    "each other": lambda root: link(root / "p", link(root / "q", root / "p")),
    "directory": lambda root: root / "inside",
    "nothing": lambda root: "missing",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_links_elsewhere_is_refused(
    root: Path, target: Callable[[Path], str | Path], name: str
) -> None:
    path = directory_with(root, name, target(root))
    with pytest.raises((PathNotAllowed, AdapterNotFound), match=r"link|regular file"):
        read_at(path, root)


def test_a_pipe_outside_is_never_opened_for_reading(root: Path) -> None:
    os.mkfifo(root.parent / "pipe")
    path = directory_with(root, WEIGHTS_NAME, "../../pipe")
    with pytest.raises(PathNotAllowed, match="out of the adapter roots"):
        read_at(path, root)
    # A writer that does not wait fails while no process has the pipe open for reading.
    with pytest.raises(OSError, match="No such device"):
        os.open(root.parent / "pipe", os.O_WRONLY | os.O_NONBLOCK)


def swapping(path: Path, target: str | Path, opened: str) -> Callable[..., bool]:
    """`_is_below`, before which a link is swapped when a place with the name `opened` is open."""
    is_below = safe_open._is_below

    def swap(place: int, roots: tuple[str, ...]) -> bool:
        if os.readlink(f"/proc/self/fd/{place}").endswith(opened):
            new = path.with_name("new")
            new.symlink_to(target)
            new.replace(path)
        return is_below(place, roots)

    return swap


@pytest.mark.parametrize("name", FILES)
def test_a_link_that_is_swapped_while_it_is_checked_reaches_nothing_outside(
    root: Path, name: str
) -> None:
    inside, outside = root / "inside" / name, root.parent / "outside" / name
    path = directory_with(root, name, inside)
    # What was opened is inside; the link leads elsewhere now.
    swap = swapping(root / path / name, outside, f"inside/{name}")
    with patch.object(safe_open, "_is_below", swap), pytest.raises(Conflict, match="another file"):
        read_at(path, root)
    # What was opened is outside.
    swap = swapping(root / path / name, inside, f"outside/{name}")
    with patch.object(safe_open, "_is_below", swap), pytest.raises(PathNotAllowed):
        read_at(path, root)
    assert read_at(path, root).model.loras


def test_a_directory_that_is_swapped_while_it_is_checked_is_read_as_it_was(root: Path) -> None:
    link(root / "current", "inside")
    before = read_at("current", root)
    swap = swapping(root / "current", root.parent / "outside", "/inside")
    with patch.object(safe_open, "_is_below", swap):
        during = read_at("current", root)
    assert torch.equal(during.model.loras[Q].lora_a, before.model.loras[Q].lora_a)
    with pytest.raises(PathNotAllowed, match="out of the adapter roots"):
        read_at("current", root)


def test_a_mount_that_is_updated_while_it_is_read_is_a_conflict(root: Path) -> None:
    path = mount(root)
    other = {name: tensor + 1 for name, tensor in tensors().items()}
    write(root / path / "..2026_02", weights=other)
    swap = swapping(root / path / "..data", "..2026_02", CONFIG_NAME)
    with patch.object(safe_open, "_is_below", swap), pytest.raises(Conflict, match="another file"):
        read_at(path, root)
    after = read_at(path, root)
    assert after.fingerprint == read_at(f"{path}/..2026_02", root).fingerprint


def tenants(root: Path) -> None:
    """Two tenants' directories; the first has links to its other version and to the second's."""
    for tenant in ("acme", "globex"):
        shutil.copytree(root / "inside", root / tenant / "v1")
    link(root / "acme" / "v2", "v1")
    link(root / "acme" / "stolen", "../globex/v1")
    shutil.copytree(root / "inside", root / "acme" / "v3")
    (root / "acme" / "v3" / WEIGHTS_NAME).unlink()
    link(root / "acme" / "v3" / WEIGHTS_NAME, root / "globex" / "v1" / WEIGHTS_NAME)
    link(root / "operators", "acme")


def test_links_after_a_mark_stay_in_the_directory_before_it(root: Path) -> None:
    tenants(root)
    for path in ("acme/stolen", "acme/v3"):
        read_at(path, root)
        for marked in (path.replace("/", "/./"), f"{root}/{path.replace('/', '/./')}"):
            with pytest.raises(PathNotAllowed, match="is a link out of 'acme'"):
                read_at(marked, root)
    for path in ("acme/./v1", "acme/./v2", "operators/./v2", "acme/v1/.", "inside/."):
        read_at(path, root)
    with pytest.raises(PathNotAllowed, match="is a link out of 'acme/v3'"):
        read_at("acme/v3/.", root)
