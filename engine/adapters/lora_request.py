"""The adapter that a request names, and the directory that its path means."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Final

_STREAM_DIRECTORY: Final = "tensorizer_dir"


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request uses; `lora_int_id` is at least 1, because 0 is the base model.

    `base_model_name` is informative only. `load_inplace`: read `lora_path` again although the id is
    known, once; after reading, use `loaded()`, which clears it. `is_3d_lora_weight`: expert weights
    must be fused, which the files are checked against; False: as in the files.
    `tensorizer_config_dict`: see `tensorizer_directory`. Raises `ValueError`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    tensorizer_config_dict: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, Integral) and not isinstance(self.lora_int_id, bool):
            # Ids often come out of arrays.
            object.__setattr__(self, "lora_int_id", int(self.lora_int_id))
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(
                f"lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}"
            )
        if not self.lora_name:
            raise ValueError("lora_name must not be empty")
        if self.load_inplace and not self.lora_path:
            raise ValueError(f"load_inplace is True for {self.lora_name!r}; it needs a lora_path")

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The same as `lora_path`."""
        return self.lora_path

    def loaded(self) -> "LoRARequest":
        """Return the same request with `load_inplace` cleared."""
        return replace(self, load_inplace=False)


def get_adapter_absolute_path(lora_path: str) -> str:
    """Return the absolute path of an adapter's directory; `~` is the home directory.

    A path always means a directory on this machine: nothing is downloaded.
    """
    return os.path.abspath(os.path.expanduser(lora_path))


def tensorizer_directory(lora_path: str, config: Mapping[str, Any] | None) -> str:
    """Return the directory to read: `config["tensorizer_dir"]` if it is there, else `lora_path`.

    The name of the weights file determines its format, so that no other key is needed. Raises
    `ValueError` for other keys: streams are read from plain directories, without keys or buckets.
    """
    others = sorted((config or {}).keys() - {_STREAM_DIRECTORY})
    if others:
        raise ValueError(
            f"tensorizer_config_dict has {others}; only {_STREAM_DIRECTORY!r} is read, because "
            "adapter streams are plain files in a directory"
        )
    return get_adapter_absolute_path(str((config or {}).get(_STREAM_DIRECTORY, lora_path)))
