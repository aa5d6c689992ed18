"""A configuration file of `serve`: TOML, with one key per option, named without its dashes."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FILE_BYTES_MAX: Final = 1 << 20


class ConfigFileError(ValueError):
    """A file that can't be read, or that has keys which are no options."""


def read_config_file(path: Path, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a file under the names of their parameters.

    `options` maps each option, without its dashes, to the name of its parameter. A key may have
    underscores in place of dashes. Raises `ConfigFileError`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX)
        values = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigFileError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"--config {path} is not TOML: {error}") from error
    found = {}
    for key, value in values.items():
        option = key.replace("_", "-")
        if option not in options:
            raise ConfigFileError(f"--config {path}: {key!r} is no option{_hint(option, options)}")
        if isinstance(value, dict):
            raise ConfigFileError(f"--config {path}: {key!r} is a table; a value is needed")
        found[options[option]] = value
    return found


def _hint(option: str, options: Mapping[str, str]) -> str:
    if option == "dir":
        return "; the directory is named before the command: loradock --dir DIRECTORY serve"
    close = difflib.get_close_matches(option, options, 1)
    return f"; did you mean {close[0]!r}?" if close else "; `loradock serve --help` lists them"
