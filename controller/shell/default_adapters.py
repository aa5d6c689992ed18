"""The adapters of requests that bring an image and name none.

What it is: the rule, and the names that these adapters have. What it is not: a part of the core,
where such a request is one that names its adapter: so the log says what ran, and a replay needs no
option. One rule: an adapter that the request names wins.

A name is made of modality and path. So other paths are other adapters, and a controller that is
started with another one serves nobody from the one before.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from messages.ids import AdapterName
from messages.requests import Generate, IllustratedPrompt, LoadAdapter, PrivateRequest

Modality = Literal["image"]
"""What a prompt can bring beside its text."""

DefaultPath = Annotated[str, Meta(min_length=1, max_length=4096)]
DefaultPaths = dict[Modality, DefaultPath]


class DefaultAdapter(Struct, frozen=True):
    """A known adapter like any other, once somebody needs it."""

    name: AdapterName
    path: DefaultPath

    def load(self) -> LoadAdapter:
        """The request, under an id that no client has, that makes it known."""
        return LoadAdapter(f"{self.name}-{secrets.token_hex(12)}", self.name, self.path)


class DefaultAdapters:
    """Which adapter a request runs under that names none."""

    def __init__(self, paths: Mapping[Modality, DefaultPath]) -> None:
        self.by_modality: Final = {m: _adapter(m, path) for m, path in paths.items()}

    def of(self, message: PrivateRequest) -> DefaultAdapter | None:
        """The default that the request runs under; None where it names its own, or has none."""
        match message:
            case Generate(adapter=None, prompt=IllustratedPrompt()):
                return self.by_modality.get("image")
        return None


def _adapter(modality: Modality, path: DefaultPath) -> DefaultAdapter:
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    return DefaultAdapter(f"default-{modality}-{digest}", path)


def default_paths(options: Iterable[str]) -> DefaultPaths:
    """What `MODALITY=PATH` options say; raises `ValueError` for one that says nothing of use."""
    paths: DefaultPaths = {}
    for option in options:
        modality, _, path = option.partition("=")
        if not modality or not path:
            raise ValueError(f"default adapter {option!r}; MODALITY=PATH is needed")
        if modality != "image":
            raise ValueError(f"default adapter {option!r}; images are all that a request can bring")
        if "image" in paths:
            raise ValueError(f"default adapter {option!r}; images have {paths['image']!r} already")
        paths["image"] = path
    return paths
