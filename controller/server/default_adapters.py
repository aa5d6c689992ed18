"""Default adapters, for requests that contain an image and name no adapter.

The request is logged with the default adapter's name, so that the log specifies which adapter ran
and a replay needs no options. An adapter that the request names takes precedence. A default
adapter's name is made from modality and path: another path is another adapter, and after a restart
with another path no request runs with the old one.
"""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from loradock.messages.ids import AdapterName
from loradock.messages.prompts import IllustratedPrompt
from loradock.messages.requests import Generate, LoadAdapter, PrivateRequest

Modality = Literal["image"]
"""A kind of content that a prompt can have in addition to text."""

DefaultPath = Annotated[str, Meta(min_length=1, max_length=4096)]
DefaultPaths = dict[Modality, DefaultPath]


class DefaultAdapter(Struct, frozen=True):
    """Name and path of a default adapter; it is loaded when a request first needs it."""

    name: AdapterName
    path: DefaultPath

    def load(self) -> LoadAdapter:
        """Return the request that loads it, with an id that no client uses."""
        return LoadAdapter(f"{self.name}-{secrets.token_hex(12)}", self.name, self.path)


class DefaultAdapters:
    """The default adapter of each modality."""

    def __init__(self, paths: Mapping[Modality, DefaultPath]) -> None:
        self.by_modality: Final = {m: _adapter(m, path) for m, path in paths.items()}

    def adapter_of(self, message: PrivateRequest) -> DefaultAdapter | None:
        """Return the default adapter that the request runs with; None where there is none."""
        match message:
            case Generate(adapter=None, prompt=IllustratedPrompt()):
                return self.by_modality.get("image")
        return None


def _adapter(modality: Modality, path: DefaultPath) -> DefaultAdapter:
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    return DefaultAdapter(f"default-{modality}-{digest}", path)
