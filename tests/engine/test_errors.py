"""The engine's errors are built-in exceptions too, as the client's errors with the same codes."""

import pytest

from loradock.client import errors as client_errors
from loradock.engine import errors as engine_errors
from loradock.engine.errors import EngineError, error_of
from loradock.messages.errors import ErrorCode

BUILT_IN = {
    ErrorCode.NO_ROOM: ("NoRoom", RuntimeError),
    ErrorCode.NOT_FOUND: ("AdapterNotFound", FileNotFoundError),
    ErrorCode.DOES_NOT_FIT: ("AdapterDoesNotFit", ValueError),
    ErrorCode.DEVICE_OUT_OF_MEMORY: ("DeviceOutOfMemory", RuntimeError),
    ErrorCode.CONFIG_REFUSED: ("AdapterConfigRefused", ValueError),
    ErrorCode.UNKNOWN_ADAPTER: ("UnknownAdapter", KeyError),
    ErrorCode.NOT_RESIDENT: ("NotResident", Exception),
    ErrorCode.NOT_FINITE: ("NotFinite", ValueError),
    ErrorCode.PATH_NOT_ALLOWED: ("PathNotAllowed", ValueError),
    ErrorCode.CONFLICT: ("Conflict", Exception),
    ErrorCode.NOT_SERVED: ("NotServed", Exception),
}


@pytest.mark.parametrize("code", BUILT_IN)
def test_engine_and_client_raise_the_same_class_names_and_built_in_exceptions(
    code: ErrorCode,
) -> None:
    name, built_in = BUILT_IN[code]
    ours, theirs = error_of(code, "why"), client_errors.ERRORS[code]("why")
    for error in (ours, theirs):
        assert type(error).__name__ == name
        assert isinstance(error, built_in)
        assert error.code is code
    assert str(ours) == "why"
    assert str(theirs).endswith(": why")
    assert ours.args == ("why",)


def test_every_error_shows_its_text_unquoted() -> None:
    """`KeyError` would quote it, and `OSError` would expect a number before it."""
    for kind in vars(engine_errors).values():
        if isinstance(kind, type) and issubclass(kind, EngineError):
            assert str(kind("a text")) == "a text"
            assert str(kind()) == ""


def test_only_missing_space_is_a_runtime_error_and_only_a_missing_file_an_os_error() -> None:
    """A handler for one cause must not catch another, in any order of its branches."""
    branches = (RuntimeError, OSError, ValueError, LookupError)
    for code, (_, built_in) in BUILT_IN.items():
        error = error_of(code, "why")
        caught = [branch for branch in branches if isinstance(error, branch)]
        expected = [branch for branch in branches if issubclass(built_in, branch)]
        assert caught == expected, code
