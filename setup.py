"""The build: `pyproject.toml`, and the tiny example, which the wheel has within `loradock`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLE = Path("examples/tiny")


class BuildWithExample(build_py):
    """Copies the example's files to where `loradock example` finds them after an installation."""

    def run(self) -> None:
        """Build the packages; an editable installation reads the example from the sources."""
        super().run()
        if not self.editable_mode:
            for path in sorted(EXAMPLE.rglob("*.json")) + sorted(EXAMPLE.rglob("*.safetensors")):
                target = Path(self.build_lib) / "loradock" / "tiny" / path.relative_to(EXAMPLE)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithExample})
