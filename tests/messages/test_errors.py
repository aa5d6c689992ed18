"""The table of error codes is complete and never changes."""

import re

from loradock.controller.log.format import LogError
from loradock.messages.errors import MEANINGS, ErrorCode
from loradock.messages.wire import WireError

# A client may have stored a code; it never gets another number or another meaning.
CODES = {
    "L001": ("NO_ROOM", True),
    "L002": ("NOT_FOUND", False),
    "L003": ("DOES_NOT_FIT", False),
    "L004": ("DEVICE_OUT_OF_MEMORY", True),
    "L005": ("CONFIG_REFUSED", False),
    "L006": ("UNKNOWN_ADAPTER", False),
    "L007": ("NOT_RESIDENT", True),
    "L008": ("NOT_FINITE", False),
    "L009": ("PATH_NOT_ALLOWED", False),
    "L010": ("CONFLICT", False),
    "L011": ("ENGINE_GONE", True),
    "L012": ("MALFORMED", False),
    "L013": ("NOT_ALLOWED", False),
    "L014": ("LOG_UNAVAILABLE", True),
    "L015": ("OVERLOADED", True),
    "L016": ("NOT_SERVED", False),
    "L017": ("HANDLING_FAILED", False),
    "L018": ("STOPPING", True),
    "L019": ("CONTEXT_EXCEEDED", False),
}


def test_codes_keep_their_name_and_whether_to_retry() -> None:
    found = {code.value: (code.name, MEANINGS[code].retryable) for code in ErrorCode}
    assert found == CODES


def test_every_code_and_no_other_has_a_meaning() -> None:
    assert list(MEANINGS) == list(ErrorCode)
    assert all(meaning.summary and meaning.typical_cause for meaning in MEANINGS.values())
    assert all(re.fullmatch(r"L\d{3}", code) for code in MEANINGS)


def test_the_errors_of_bytes_and_of_the_log_carry_their_code() -> None:
    assert WireError.code is ErrorCode.MALFORMED
    assert all(kind.code is ErrorCode.LOG_UNAVAILABLE for kind in LogError.__subclasses__())
