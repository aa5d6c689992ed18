"""The errors of engine and client are one tree, and built-in exceptions too."""

import pytest
import torch

import loradock
from loradock.engine import errors as engine_errors
from loradock.engine.errors import code_of, error_of, is_out_of_memory
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


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul( ltHandle, ...)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: out of memory",
    ],
)
def test_a_lack_of_device_memory_in_a_library_has_the_code_of_one_in_torch(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert (
        code_of(RuntimeError(text))
        is code_of(torch.OutOfMemoryError())
        is (ErrorCode.DEVICE_OUT_OF_MEMORY)
    )
    assert not is_out_of_memory(ValueError(text))


def test_other_errors_of_a_device_end_the_engine() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not is_out_of_memory(error)
    assert code_of(error) is ErrorCode.ENGINE_GONE
