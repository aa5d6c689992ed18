"""The engine's command line: a parser made from `EngineArguments`, and the configurations.

Values are validated by the configurations. Some of their fields are not options: `adapter_bounds`
is for programs that use the engine as a library, and the number of adapters on the host
(`max_cpu_loras`) is the controller's decision.
"""

from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final
from uuid import uuid4

import msgspec

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.messages.engine_options import EngineArguments
from loradock.processes.option_list import Option, options_of

_ENGINE_ID_CHARACTERS: Final = 32


def parse(arguments: Sequence[str] | None) -> EngineArguments:
    """Read a command line; print the error and end the process where it can't be read."""
    parser = ArgumentParser(
        "python -m loradock.engine.worker", description="A LoRADock engine process."
    )
    options = sorted(options_of(EngineArguments), key=lambda option: not option.is_required)
    for option in options:
        _add(parser, option)
    parsed = vars(parser.parse_args(arguments))
    values: dict[str, Any] = {
        option.field: tuple(value) if option.is_repeated else value
        for option in options
        if (value := parsed[option.field]) is not None
    }
    unique = values.get("launch_id", "") + uuid4().hex
    found = EngineArguments(**{"engine_id": unique[:_ENGINE_ID_CHARACTERS], **values})
    if not found.connect.startswith(("ipc://", "tcp://")):
        parser.error(f"--connect {found.connect}: only ipc:// and tcp:// are supported")
    if found.log_format not in ("console", "json"):
        parser.error(f"--log-format {found.log_format}: only console and json are known")
    return found


def _add(parser: ArgumentParser, option: Option) -> None:
    """Add an option whose value is None where it is not given."""
    settings: dict[str, Any] = {"dest": option.field, "help": option.help.replace("%", "%%")}
    if option.kind is bool:
        settings["action"] = BooleanOptionalAction
    else:
        settings |= {"type": option.kind, "metavar": option.metavar}
    if option.is_repeated:
        settings["action"] = "append"
    parser.add_argument(option.flag, required=option.is_required, **settings)


def configs(arguments: EngineArguments) -> tuple[EngineConfig, LoRAConfig]:
    """Return the two configurations that the arguments specify; raises `ValueError`."""
    values = msgspec.structs.asdict(arguments)
    values["model_directory"] = arguments.model
    values["target_modules"] = arguments.target_modules or None
    if not arguments.dual_stream:
        # The default depends on the environment.
        del values["dual_stream"]
    values["default_mm_loras"] = dict(map(_modality, arguments.default_mm_loras)) or None
    values["adapter_weights"] = dict(map(_weight, arguments.adapter_weights)) or None
    engine, lora = (
        {field.name: values[field.name] for field in fields(owner) if field.name in values}
        for owner in (EngineConfig, LoRAConfig)
    )
    return EngineConfig(**engine), LoRAConfig(**lora)


def _modality(text: str) -> tuple[str, str]:
    modality, _, path = text.partition("=")
    if not modality or not path:
        raise ValueError(f"--default-mm-lora {text!r}; MODALITY=PATH is needed")
    return modality, path


def _weight(text: str) -> tuple[str, int]:
    adapter, _, weight = text.partition("=")
    if not adapter or not weight.isdecimal() or not weight.isascii():
        raise ValueError(f"--adapter-weight {text!r}; ADAPTER=NUMBER is needed")
    return adapter, int(weight)
