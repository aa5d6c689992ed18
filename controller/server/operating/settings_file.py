"""The settings that were changed while a server ran, in a file of its directory.

They are in force again after a restart with the same options. A start with other options discards
them: what its command line specifies is newer.
"""

from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.limits import Limits, LimitsError, limits_from, limits_to
from loradock.controller.log.storage import write_file

FILE: Final = "settings.json"
BYTES_MAX: Final = 1 << 20

log = structlog.get_logger("controller")


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits, as a log's header stores them, and a policy."""

    limits: dict[str, int]
    policy: str


class ChangedSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: the settings of the options, and those in force."""

    options: Settings
    changed: Settings


class SettingsFile:
    """The file of a controller's directory, for the settings that its options specify."""

    def __init__(self, directory: Path, limits: Limits, policy: str) -> None:
        self._path = directory / FILE
        self._options = Settings(limits_to(limits), policy)

    def read(self) -> tuple[Limits, str]:
        """Return the settings to start with; a file for other options is removed."""
        usual = limits_from(self._options.limits), self._options.policy
        try:
            data = self._path.read_bytes()[:BYTES_MAX]
        except FileNotFoundError:
            return usual
        try:
            found = msgspec.json.decode(data, type=ChangedSettings)
            changed = limits_from(found.changed.limits), found.changed.policy
        except (msgspec.DecodeError, LimitsError) as error:
            log.warning(
                "the changed settings can't be read", file=str(self._path), error=str(error)
            )
            return usual
        if found.options != self._options or changed[1] not in POLICIES:
            log.info("changed settings are discarded: the server's options are others now")
            self._path.unlink(missing_ok=True)
            return usual
        return changed

    def write(self, limits: Limits, policy: str) -> None:
        """Store changed settings durably; raises `OSError`."""
        changed = Settings(limits_to(limits), policy)
        if changed == self._options:
            self._path.unlink(missing_ok=True)
            return
        write_file(self._path, msgspec.json.encode(ChangedSettings(self._options, changed)))
