"""Model names: what `model` of a request may be, and the cards of `GET /v1/models`.

A name is the base model's, an adapter's, or both with a colon between them.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.adapters.views import ModelList, model_card
from loradock.gateway.http.errors import model_not_found
from loradock.messages.ids import NAME_PATTERN

BASE_NAME_DEFAULT: Final = "base"
_ADAPTER: Final = re.compile(NAME_PATTERN)


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _ADAPTER.search(name) is not None


class ModelNames:
    """The names of the base model; the first one is in answers."""

    def __init__(self, served: Sequence[str], directory: str = "") -> None:
        self._served: Final = tuple(served)
        self.directory = ""
        self.base_names: tuple[str, ...] = ()
        """All names of the base model."""
        self.set_own_name(BASE_NAME_DEFAULT)
        if directory:
            self.set_directory(directory)

    def set_directory(self, directory: str) -> None:
        """Set the base model's directory, which also names the model by default."""
        self.directory = directory
        self.set_own_name(Path(directory).resolve().name or BASE_NAME_DEFAULT)

    def set_own_name(self, name: str) -> None:
        """Set the name that the engine reports, where the directory is not known."""
        own = (name, self.directory) if self.directory else (name,)
        self.base_names = self._served or own

    @property
    def listed(self) -> tuple[str, ...]:
        """The names of the base model in lists: all that are configured, else its own."""
        return self._served or self.base_names[:1]

    @property
    def base(self) -> str:
        """The name of the base model in answers."""
        return self.base_names[0]

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request names; None for the base model.

        Raises `HttpError` for a name that no adapter may have.
        """
        if not model or model in self.base_names:
            return None
        for base in self.base_names:
            if model.startswith(f"{base}:"):
                model = model[len(base) + 1 :]
                break
        if not is_adapter_name(model):
            raise model_not_found(model)
        return model

    def shown(self, adapter: str | None) -> str:
        """Return the name of the model in answers."""
        return self.base if adapter is None else adapter


def context_tokens(directory: str) -> int | None:
    """Return the context length in a model's config.json; None where there is none."""
    try:
        config = json.loads((Path(directory) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        found = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(found, int) and found > 0:
            return found
    return None


def model_cards(names: ModelNames, table: AdapterTable, context: int | None) -> ModelList:
    """Return a card per name of the base model, and per adapter that was loaded at least once."""
    bases = (model_card(one, names.directory or one, None, context) for one in names.listed)
    adapters = (
        model_card(view.adapter, view.path, names.base, context)
        for _, view in sorted(table.views.items())
        if view.fingerprint
    )
    return ModelList([*bases, *adapters])
