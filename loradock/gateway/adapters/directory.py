"""Small text files in an adapter's directory, as a gateway reads them: below configured roots only.

The engine has checked the adapter's own files by its rules. A gateway reads others beside them,
possibly on another machine, so it checks again.
"""

import os
from collections.abc import Sequence

from loradock.processes.safe_open import NoSuchName, NotAllowed, NotFound, SafeDirectory


class NotReadable(Exception):  # noqa: N818 - what the files are
    """Files that this gateway can't or may not read; the text says why."""


class FileRefused(Exception):  # noqa: N818 - what happens to the file
    """A file that is there, and is not used; the text says why."""


class AdapterDirectory:
    """The directory of an adapter, open within a `with` block.

    `path` is the adapter's, absolute or relative to one of `roots`. Raises `NotReadable`.
    """

    def __init__(self, path: str, roots: Sequence[str]) -> None:
        try:
            self._directory = SafeDirectory(path, roots)
        except (NotAllowed, NotFound) as error:
            raise NotReadable(str(error)) from error

    def __enter__(self) -> "AdapterDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._directory.descriptor)

    def read(self, name: str, bytes_max: int) -> str | None:
        """Return the text of a file; None if there is none of this name.

        Raises `NotReadable`, and `FileRefused` for one that is longer than `bytes_max` or no text.
        """
        try:
            with open(self._directory.open(name), "rb") as file:
                data = file.read(bytes_max + 1)
                size_bytes = max(len(data), os.fstat(file.fileno()).st_size)
        except NoSuchName:
            return None
        except (NotAllowed, NotFound, OSError) as error:
            raise NotReadable(f"{name} can't be read: {error}") from error
        if len(data) > bytes_max:
            raise FileRefused(f"{name} has {size_bytes} bytes; at most {bytes_max} are read")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise FileRefused(f"{name} is not UTF-8") from error
