"""The engine's command line: every field of its two configurations is an option.

What it is: a parser made from the configurations' own fields. What it is not: a judge of values,
which the configurations are. One rule: an option is named like its field, and one that is not
given leaves the field's default.

`controller.shell.engine_options` lists the same options for `loradock serve`; a test holds the two
equal.
"""

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from engine.config import EngineConfig, LoRAConfig

REPEATED: Final = {
    "adapter_roots": "--adapter-root",
    "target_modules": "--target-module",
    "default_mm_loras": "--default-mm-lora",
}
"""The fields that have several values: their option has one, and may be given several times."""

NO_OPTIONS: Final = {
    EngineConfig: ("model_directory", "adapter_bounds"),
    LoRAConfig: ("max_cpu_loras",),
}
"""The fields that are no option: the model has a shorter name, bounds are the programmer's, and how
many adapters the host keeps is its controller's to say."""

_SWITCHES: Final = (bool, bool | None)


def parse(arguments: Sequence[str] | None) -> Namespace:
    """What a command line says; ends the process, with a word, for one that can't be read."""
    parser = ArgumentParser("python -m engine.worker", description="A LoRADock engine process.")
    parser.add_argument("--connect", required=True, help="the controller's ipc:// socket")
    parser.add_argument("--model", required=True, type=Path, help="directory of the base model")
    parser.add_argument("--parent-pid", type=int, help="the supervisor, to end when it has ended")
    parser.add_argument("--engine-id", default=uuid4().hex, help="the name of this life")
    for owner in NO_OPTIONS:
        for name in option_names(owner):
            _add(parser, owner, name)
    options = parser.parse_args(arguments)
    if not options.connect.startswith("ipc://"):
        parser.error(f"--connect {options.connect}: only ipc:// is open without CURVE keys")
    return options


def option_names(owner: type[EngineConfig] | type[LoRAConfig]) -> list[str]:
    """The fields of a configuration that are options."""
    return [field.name for field in fields(owner) if field.name not in NO_OPTIONS[owner]]


def configs(options: Namespace) -> tuple[EngineConfig, LoRAConfig]:
    """The two configurations that the options say; raises `ValueError`."""
    engine, lora = (
        {
            name: value
            for name in option_names(owner)
            if (value := getattr(options, name)) is not None
        }
        for owner in (EngineConfig, LoRAConfig)
    )
    if "default_mm_loras" in lora:
        lora["default_mm_loras"] = dict(map(_modality, lora["default_mm_loras"]))
    return EngineConfig(options.model, **engine), LoRAConfig(**lora)


def _add(parser: ArgumentParser, owner: type[Any], name: str) -> None:
    field = owner.__dataclass_fields__[name]
    if name in REPEATED:
        parser.add_argument(REPEATED[name], action="append", dest=name)
    elif field.type in _SWITCHES:
        parser.add_argument(flag(name), action=BooleanOptionalAction, default=None)
    else:
        parser.add_argument(flag(name), type=int if field.type is int else str)


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def _modality(text: str) -> tuple[str, str]:
    modality, _, path = text.partition("=")
    if not modality or not path:
        raise ValueError(f"--default-mm-lora {text!r}; MODALITY=PATH is needed")
    return modality, path
