"""The rights of each key, and which adapters exist for it.

For a key that is limited to patterns of names, an adapter with another name does not exist: it is
in no reply and no event, and requests for it are answered as for an unknown name. If an unknown
name would be loaded, every name outside the patterns is refused, whether it exists or not.
"""

import re
import threading
from collections.abc import Callable
from fnmatch import translate
from functools import partial
from pathlib import PurePosixPath
from typing import Final, NamedTuple, TypeVar, get_args

import msgspec
import structlog

from loradock.controller.core.context import Refusal, unknown_adapter
from loradock.controller.server.keys import AllowedKey, KeyListError, KeyStore, Right
from loradock.messages import control, events, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import EventsFetched, Reply, Request
from loradock.messages.views import FailureView

REQUESTS_DOMAIN: Final = "requests"
EVENTS_DOMAIN: Final = "events"
ENGINE_DOMAIN: Final = "engine"
LOCAL_DOMAIN: Final = "local"
"""The sockets that need no key, because the system admits one user's processes only."""

OWN_ENGINE: Final = "(own engine)"
"""The user of the engine that this controller's supervisor starts; no key in a file has it."""

LOCAL_USER: Final = ""
"""The user of every local connection: the controller's own, which may do everything."""

_LEVEL: Final[dict[Right, int]] = {"engine": 0, "read": 1, "operate": 2, "administrate": 3}

_LOADING: Final = (
    requests.LoadAdapter,
    requests.StageAdapter,
    requests.ActivateAdapter,
    requests.HoldAdapter,
    requests.PrefetchAdapter,
)
"""Requests that load an adapter under a name that is not known yet."""

_OF_ALL: Final = (control.ListRequests, control.ListSlow, *get_args(control.ServerCommand))
"""Requests that concern the adapters of every key."""

RIGHT_OF: Final[dict[type[Request], Right]] = {
    requests.ListAdapters: "read",
    requests.ShowAdapter: "read",
    requests.ShowStatus: "read",
    requests.FetchEvents: "read",
    control.ShowSettings: "read",
    control.ListRequests: "administrate",
    control.ListSlow: "administrate",
    control.CancelRequest: "administrate",
    control.ChangeSettings: "administrate",
    control.StopServer: "administrate",
    requests.LoadAdapter: "operate",
    requests.StageAdapter: "operate",
    requests.ActivateAdapter: "operate",
    requests.ActivateBatch: "operate",
    requests.PrefetchAdapter: "operate",
    requests.Generate: "operate",
    requests.Embed: "operate",
    requests.Classify: "operate",
    requests.CancelGeneration: "operate",
    requests.HoldAdapter: "administrate",
    requests.ReleaseAdapter: "administrate",
    requests.DeactivateAdapter: "administrate",
    requests.EvictAdapter: "administrate",
    requests.RemoveAdapter: "administrate",
}
"""The right that each request needs; replacing an adapter's content needs `administrate`."""

_FOR_ALL: Final = (
    events.ControllerResumed,
    events.EngineAttached,
    events.EngineDetached,
    events.PolicyFailed,
)
"""Events that no adapter is the subject of."""

_ABSOLUTE_PATH: Final = re.compile(r"(?<![\w.)~-])/[^\s,;:'\"]+")

FailureT = TypeVar("FailureT", requests.Refused, FailureView)

log = structlog.get_logger("controller")


class _User(NamedTuple):
    """One key as it is used: the patterns of adapters' names are one expression."""

    key: AllowedKey
    names: re.Pattern[str] | None

    def sees(self, name: str) -> bool:
        """Return whether an adapter of this name exists for the key."""
        return self.names is None or bool(self.names.match(name))


class Access:
    """The allowed keys, read again whenever their list changes.

    `own`: keys that are allowed as long as this process runs, in no file. Connections are
    authenticated on other threads; a reader sees one whole table.
    """

    def __init__(self, store: KeyStore | None = None, own: tuple[AllowedKey, ...] = ()) -> None:
        self._store = store
        self._own = own
        self._stamp = (-1, 0, 0)
        self._lock = threading.Lock()
        self._users: dict[str, _User] = {}
        self._by_public: dict[str, _User] = {}
        # Public keys that were allowed since this process began, and are not any more.
        self._revoked: frozenset[str] = frozenset()
        self.revocations = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the list if it has changed; `revocations` increases if a key lost anything."""
        if self._store is None:
            return
        with self._lock:
            stamp = self._store.stamp()
            if stamp != self._stamp:
                # Before reading: a change meanwhile is then read the next time.
                self._stamp = stamp
                self._read(self._store)

    def _read(self, store: KeyStore) -> None:
        try:
            keys = (*self._own, *store.read())
        except KeyListError as error:
            log.error(
                "the list of keys can't be read: only the own engine is admitted", error=error
            )
            keys = self._own
        before, known = self._users, self._revoked | self._by_public.keys()
        self._users = {key.name: _User(key, _expression(key.adapters)) for key in keys}
        self._by_public = {user.key.public: user for user in self._users.values()}
        self._revoked = frozenset(known - self._by_public.keys())
        for name, user in before.items():
            if name not in self._users or self._users[name].key != user.key:
                self.revocations += 1
                log.info("a key was revoked", key=name)

    @property
    def clients(self) -> int:
        """The number of keys that may send requests."""
        return sum(user.key.right != "engine" for user in self._users.values())

    def user_of(self, domain: str, public: str) -> str | None:
        """Return the name of a key that may connect to the sockets of `domain`, else None."""
        self.refresh()
        # One look: a name can be another key's in the next table.
        user = self._by_public.get(public)
        if user is None or (user.key.right == "engine") != (domain == ENGINE_DOMAIN):
            return None
        if domain == EVENTS_DOMAIN and user.names is not None:
            # Published events are the same for all subscribers.
            return None
        return user.key.name

    def is_revoked(self, public: str) -> bool:
        """Return whether a key was allowed since this process began, and is not any more."""
        return public in self._revoked

    def is_engine(self, user: str) -> bool:
        """Return whether the key is still allowed as an engine's."""
        found = self._users.get(user)
        return found is not None and found.key.right == "engine"

    def visible(self, user: str, name: str) -> bool:
        """Return whether an adapter of this name exists for a user."""
        if user == LOCAL_USER:
            return True
        found = self._users.get(user)
        return found is not None and found.sees(name)

    def refusal(self, user: str, message: Request) -> Refusal | None:
        """Return why a user may not send a request; None if it may."""
        if user == LOCAL_USER:
            return None
        found = self._users.get(user)
        if found is None:
            return Refusal(ErrorCode.NOT_ALLOWED, "the key is not allowed here any more")
        needed = RIGHT_OF[type(message)]
        if isinstance(message, requests.LoadAdapter) and message.replace:
            needed = "administrate"
        if _LEVEL[found.key.right] < _LEVEL[needed]:
            return Refusal(
                ErrorCode.NOT_ALLOWED,
                f"{type(message).__name__} needs the right {needed!r}; key {user!r} has "
                f"{found.key.right!r}",
            )
        return _refusal_of_names(found, message)

    def sees(self, user: str) -> Callable[[str], bool] | None:
        """Return which adapters' names exist for a user; None: all."""
        found = self._users.get(user)
        if user == LOCAL_USER or (found is not None and found.names is None):
            return None
        return lambda name: self.visible(user, name)

    def confined(self, user: str, message: Request, loaded_from: str) -> Request:
        """Return a request to load an adapter; links can't lead a limited key to another's files.

        The directory that the key owns is marked by `/./` in the path. `loaded_from`: the path of
        the adapter if it is known, which stays as it is.
        """
        if not isinstance(message, _LOADING) or self.sees(user) is None:
            return message
        if message.path in ("", loaded_from) and (message.path or loaded_from):
            return message
        first, *rest = PurePosixPath(message.path).parts if message.path else (message.adapter,)
        return msgspec.structs.replace(message, path="/".join((first, ".", *rest)))

    def shown(self, user: str, reply: Reply) -> Reply:
        """Return a reply without what a limited key can't see.

        This removes the content of other adapters' events, and the server's paths from refusals.
        """
        if self.sees(user) is None:
            return reply
        if isinstance(reply, requests.Refused):
            return _without_paths(reply)
        if isinstance(reply, requests.AdapterShown) and reply.failure is not None:
            return msgspec.structs.replace(reply, failure=_without_paths(reply.failure))
        if not isinstance(reply, EventsFetched):
            return reply
        found = self._users.get(user)
        shown = tuple(
            one if found is not None and _is_shown(found, one.event) else _withheld(one)
            for one in reply.events
        )
        return msgspec.structs.replace(reply, events=shown)


def _expression(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(translate, patterns))) if patterns else None


def _refusal_of_names(user: _User, message: Request) -> Refusal | None:
    if user.names is not None and isinstance(message, _OF_ALL):
        return Refusal(
            ErrorCode.NOT_ALLOWED,
            f"{type(message).__name__} is about all adapters; key {user.key.name!r} is limited to "
            f"{', '.join(user.key.adapters)}",
        )
    foreign = [name for name in _names_in(message) if not user.sees(name)]
    allowed = ", ".join(user.key.adapters)
    if foreign:
        if isinstance(message, _LOADING):
            return Refusal(
                ErrorCode.NOT_ALLOWED,
                f"key {user.key.name!r} is limited to adapters {allowed}; {foreign[0]!r} is none "
                "of them",
            )
        return unknown_adapter(foreign[0])
    path = getattr(message, "path", "")
    if path and user.names is not None and not _is_own_path(user, path):
        return Refusal(
            ErrorCode.NOT_ALLOWED,
            f"key {user.key.name!r} is limited to adapters {allowed}; a path has to be relative "
            "and to begin with such a name",
        )
    return None


def _without_paths(failure: FailureT) -> FailureT:
    """Return a refusal with the server's absolute paths replaced."""
    hide = partial(_ABSOLUTE_PATH.sub, "(a directory of the server)")
    details = tuple(map(hide, failure.details))
    return msgspec.structs.replace(failure, message=hide(failure.message), details=details)


def _is_own_path(user: _User, path: str) -> bool:
    parts = PurePosixPath(path).parts
    return ".." not in parts and bool(parts) and user.sees(parts[0])


def _names_in(message: Request) -> tuple[str, ...]:
    """Return the names of adapters in a request; the base model has none."""
    if isinstance(message, requests.ActivateBatch):
        return message.adapters
    name = getattr(message, "adapter", None)
    return () if name is None else (name,)


def _is_shown(user: _User, event: events.Event) -> bool:
    return isinstance(event, _FOR_ALL) or user.sees(getattr(event, "adapter", ""))


def _withheld(published: events.Published) -> events.Published:
    return events.Published(published.seq, published.time_ns, events.EventWithheld())
