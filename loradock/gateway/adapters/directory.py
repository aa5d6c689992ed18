"""Small text files in an adapter's directory, as a gateway reads them: below configured roots only.

The engine has checked the adapter's own files by its rules. A gateway reads others beside them,
possibly on another machine, so it checks again: a path, and each link that it leads through, has to
end below a root, and the place of what was opened is read from its descriptor, so that nothing that
is swapped meanwhile changes what was checked.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

_PLACE: Final = os.O_PATH | os.O_CLOEXEC
_MISSING: Final = (errno.ENOENT, errno.ENOTDIR)


class NotReadable(Exception):  # noqa: N818 - what the files are
    """Files that this gateway can't or may not read; the text says why."""


class FileRefused(Exception):  # noqa: N818 - what happens to the file
    """A file that is there, and is not used; the text says why."""


class AdapterDirectory:
    """The directory of an adapter, open within a `with` block.

    `path` is the adapter's, absolute or relative to one of `roots`. Raises `NotReadable`.
    """

    def __init__(self, path: str, roots: Sequence[str]) -> None:
        self._places: Final = tuple(os.path.realpath(root) for root in roots)
        if ".." in PurePosixPath(path).parts:
            raise NotReadable(f"{path} has '..' in it")
        self._directory = self._open(path, roots)

    def __enter__(self) -> "AdapterDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)

    def read(self, name: str, bytes_max: int) -> str | None:
        """Return the text of a file; None if there is none of this name.

        Raises `NotReadable`, and `FileRefused` for one that is longer than `bytes_max` or no text.
        """
        try:
            place = os.open(name, _PLACE, dir_fd=self._directory)
        except OSError as error:
            if error.errno in _MISSING:
                return None
            raise NotReadable(f"{name} can't be opened: {error.strerror}") from error
        try:
            return self._text_of(place, name, bytes_max)
        except OSError as error:
            raise NotReadable(f"{name} can't be read: {error.strerror}") from error
        finally:
            os.close(place)

    def _open(self, path: str, roots: Sequence[str]) -> int:
        """Return a descriptor of the directory, in the first root that has it."""
        candidates = [Path(path)] if path.startswith("/") else [Path(root, path) for root in roots]
        reason = f"{path} is below none of the adapter roots: {', '.join(roots)}"
        for candidate in candidates:
            try:
                place = os.open(candidate, _PLACE | os.O_DIRECTORY)
            except (OSError, ValueError) as error:
                reason = f"{candidate} can't be opened: {getattr(error, 'strerror', error)}"
                continue
            if self._is_below_a_root(place):
                return place
            os.close(place)
            reason = f"{candidate} leads out of the adapter roots: {', '.join(roots)}"
        raise NotReadable(reason)

    def _is_below_a_root(self, place: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{place}")
        return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in self._places)

    def _text_of(self, place: int, name: str, bytes_max: int) -> str:
        status = os.fstat(place)
        if not self._is_below_a_root(place):
            raise NotReadable(f"{name} is a link out of the adapter roots")
        # A second name may be outside all roots, in a directory that its owner keeps closed.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise NotReadable(f"{name} is not a regular file with a single name")
        if status.st_size > bytes_max:
            raise FileRefused(f"{name} has {status.st_size} bytes; at most {bytes_max} are read")
        # A path through the descriptor names the file that was checked.
        descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise FileRefused(f"{name} has more than {bytes_max} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise FileRefused(f"{name} is not UTF-8") from error
