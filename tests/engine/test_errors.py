"""The errors of engine and client are one tree, and built-in exceptions too."""

import pytest

import loradock
from loradock.engine import errors as engine_errors
from loradock.engine.errors import error_of
from loradock.messages.errors import ERRORS, ErrorCode, LoradockError

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


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_class_which_is_public_and_the_built_in_exception(code: ErrorCode) -> None:
    error = error_of(code, "why", details=("a detail",))
    assert (type(error), error.code) == (ERRORS[code], code)
    assert (error.message, error.args, error.details) == ("why", ("why",), ("a detail",))
    assert str(error).startswith(f"{code.value} ")
    assert str(error).endswith(": why")
    name, built_in = BUILT_IN.get(code, (type(error).__name__, Exception))
    assert type(error).__name__ == name
    assert isinstance(error, built_in)
    assert code is ErrorCode.CONTEXT_EXCEEDED or getattr(loradock, name) is type(error)


def test_every_error_shows_its_text_unquoted() -> None:
    """`KeyError` would quote it, and `OSError` would expect a number before it."""
    for kind in (*vars(engine_errors).values(), *ERRORS.values()):
        if isinstance(kind, type) and issubclass(kind, LoradockError) and hasattr(kind, "code"):
            assert str(kind("a text")).endswith(": a text")
            about = kind("a text", "r").about("it")
            assert (type(about), about.message, about.request_id) == (kind, "it: a text", "r")


def test_only_missing_space_is_a_runtime_error_and_only_a_missing_file_an_os_error() -> None:
    """A handler for one cause must not catch another, in any order of its branches."""
    branches = (RuntimeError, OSError, ValueError, LookupError)
    for code, (_, built_in) in BUILT_IN.items():
        error = error_of(code, "why")
        caught = [branch for branch in branches if isinstance(error, branch)]
        expected = [branch for branch in branches if issubclass(built_in, branch)]
        assert caught == expected, code
