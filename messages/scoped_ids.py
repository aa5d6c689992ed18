"""Request ids inside the controller, its log and the engine: `CLIENT:ID`.

`ID` is what the client chose, `CLIENT` its name, so that no client can name another's request.
"""

from base64 import urlsafe_b64encode
from hashlib import blake2b
from typing import Final

from messages.ids import RequestId

_NAME_BYTES: Final = 12
_USER_BYTES_MAX: Final = blake2b.PERSON_SIZE


def client_name(token: bytes, user: str) -> str:
    """Return the name, 16 characters, of the client with a token; `user` is that of its key.

    The token is secret: it proves that a frame is of the client. The name is not.
    """
    person = user.encode()
    if len(person) > _USER_BYTES_MAX:
        person = blake2b(person, digest_size=_USER_BYTES_MAX).digest()
    name = blake2b(token, person=person, digest_size=_NAME_BYTES).digest()
    return urlsafe_b64encode(name).decode()


def scoped(client: str, request_id: RequestId) -> RequestId:
    """Return the id of a client's request inside the controller."""
    return f"{client}:{request_id}"


def client_of(request_id: RequestId) -> str:
    """Return the client's name; empty for an id that the controller made."""
    client, colon, _ = request_id.partition(":")
    return client if colon else ""


def unscoped(request_id: RequestId) -> RequestId:
    """Return the id that the client chose."""
    client, colon, own = request_id.partition(":")
    return own if colon else client
