"""LoRADock as a wheel, installed into an environment of its own with this one's libraries."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

from tests.support.sources import PROGRAM, ROOT

BUILD = "from setuptools import build_meta; build_meta.build_wheel({!r})"
SOURCES = (*PROGRAM, "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(directory: Path, without: Collection[str] = ()) -> Path:
    """Build and install; return the environment's directory with its programs.

    `without`: the libraries of this environment that the other one does not have.
    """
    wheel = build(directory)
    environment = directory / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # Only the directory is added: what its own .pth files name, as this checkout, is not.
    [packages] = environment.glob("lib/python*/site-packages")
    libraries = Path(sysconfig.get_path("purelib"))
    if without:
        visible = directory / "libraries"
        visible.mkdir()
        for path in libraries.iterdir():
            if path.name.partition(".")[0] not in without and path.suffix != ".pth":
                (visible / path.name).symlink_to(path)
        libraries = visible
    (packages / "libraries.pth").write_text(str(libraries))
    return environment / "bin"


def build(directory: Path) -> Path:
    """Build a wheel from a copy of the sources, in which the build leaves its files."""
    sources = directory / "sources"
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, sources / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, sources / name)
    run(sys.executable, "-c", BUILD.format(str(directory)), cwd=sources)
    [wheel] = directory.glob("*.whl")
    return wheel
