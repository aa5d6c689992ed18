"""What an `adapter_config.json` says, and what of it is refused.

What it is: the fields that the arithmetic needs, read strictly, and one table of refusals. What it
is not: a reader of files. One rule: a field that would change the result and is not carried out is
refused; a field that only describes training is ignored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from engine.adapters.bounded_regex import PatternRefused, PatternTable
from engine.adapters.files.bounded_json import decode_object
from engine.adapters.files.directory import open_adapter
from engine.adapters.files.problems import Problems, shown
from engine.config import DEFAULT_BOUNDS, AdapterBounds, LoRAConfig
from engine.errors import AdapterConfigRefused, AdapterDoesNotFit

T = TypeVar("T")


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_harmless_start(value: Any) -> bool:
    """Whether an initialisation leaves the base weights alone, as far as PEFT loads them again."""
    if isinstance(value, str):
        return value.lower() in {"gaussian", "eva", "orthogonal", "mica", "lora_ga"}
    return value is None or isinstance(value, bool)


CLASSIFICATION_HEADS: Final = ("classifier", "score")
"""Modules that an adapter may bring whole; PEFT names both, whichever the model has."""


def _are_heads(value: Any) -> bool:
    return _is_off(value) or (
        isinstance(value, list) and all(name in CLASSIFICATION_HEADS for name in value)
    )


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
    return _is_off(value) or is_list


class Refusal(NamedTuple):
    """A field whose value must be `allowed`, and what to say where it is not."""

    field: str
    allowed: Callable[[Any], bool]
    text: str


REFUSALS: Final = (
    Refusal("peft_type", lambda v: v in (None, "LORA"), "only LORA adapters are served"),
    Refusal(
        "bias", lambda v: v in (None, "none"), "trained biases are not served; train with none"
    ),
    Refusal("use_dora", _is_off, "DoRA is not served"),
    Refusal("lora_bias", _is_off, "a bias in B is not served"),
    Refusal("alora_invocation_tokens", lambda v: v is None, "activated LoRA is not served"),
    Refusal("layer_replication", _is_off, "replicated layers are not served"),
    Refusal(
        "init_lora_weights",
        _is_harmless_start,
        "it may have changed the base weights; convert the adapter to plain LoRA when saving it",
    ),
    Refusal(
        "modules_to_save",
        _are_heads,
        f"of whole trained modules only heads are served: {', '.join(CLASSIFICATION_HEADS)}",
    ),
    Refusal("target_parameters", _are_names, "a list of names is needed"),
    Refusal("trainable_token_indices", _is_off, "trained token embeddings are not served"),
    Refusal("use_qalora", _is_off, "QA-LoRA is not served"),
    Refusal("use_bdlora", _is_off, "block-diagonal LoRA is not served"),
    Refusal("kasa_config", _is_off, "KaSA changes the base weights and is not served"),
    Refusal("monteclora_config", _is_off, "MonteCLoRA is not served"),
    Refusal("arrow_config", _is_off, "arrow routing is not served"),
    Refusal("auto_map", _is_off, "a config that names code is not read"),
    Refusal("trust_remote_code", _is_off, "a config that names code is not read"),
)
"""Every value that is refused whatever else the config says. PEFT's own `auto_mapping` and
`megatron_core` name classes too, in every adapter that it saves; they are never looked up."""

_TRAINING_ONLY: Final = (
    "use_rslora",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "megatron_config",
    "runtime_config",
)
_KNOWN_VARIANTS: Final = frozenset([refusal.field for refusal in REFUSALS]).union(_TRAINING_ONLY)
"""Fields named as PEFT names its variants, told above, read below, or void when serving."""


@dataclass(frozen=True, eq=False)
class PEFTHelper:
    """What the arithmetic needs of a PEFT config.

    `target_modules`: names, or one pattern, as the config has them; they are not evaluated,
    because the weights' names say what is adapted. A module's own rank and scaling are told by
    the methods, patterns included. `has_exclusions`: some of the targets may have been left out.
    `modules_to_save`: heads that the adapter brings whole. `target_parameters`: adapted parameters
    themselves, by path or its end.
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    has_exclusions: bool
    use_rslora: bool
    fan_in_fan_out: bool
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()

    @classmethod
    def from_local_dir(cls, directory: str, bounds: AdapterBounds = DEFAULT_BOUNDS) -> "PEFTHelper":
        """What a directory's config says; raises like `from_dict`, and `AdapterNotFound`."""
        with open_adapter(directory, [Path(directory)]) as files:
            return cls.from_dict(decode_config(files.read_config(bounds), bounds), bounds)

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], bounds: AdapterBounds = DEFAULT_BOUNDS
    ) -> "PEFTHelper":
        """What `config` says; raises `AdapterConfigRefused` with everything that is wrong."""
        problems = Problems(bounds.problems_max)
        helper = cls.read(config, bounds, problems)
        if helper is None or problems:
            raise problems.error()
        return helper

    @classmethod
    def read(
        cls, config: Mapping[str, Any], bounds: AdapterBounds, problems: Problems
    ) -> "PEFTHelper | None":
        """What `config` says, with what is wrong in `problems`; None where it can't be read."""
        fields = _Fields(config, bounds, problems)
        fields.refuse()
        refused = len(problems)
        no_targets: tuple[str, ...] | str = ()
        helper = cls(
            r=fields.required("r", _as_rank, 1),
            lora_alpha=fields.required("lora_alpha", _as_alpha, 1.0),
            target_modules=fields.targets(no_targets),
            has_exclusions=not _is_off(config.get("exclude_modules")),
            use_rslora=fields.switch("use_rslora"),
            fan_in_fan_out=fields.switch("fan_in_fan_out"),
            rank_pattern=fields.patterns("rank_pattern", _as_rank),
            alpha_pattern=fields.patterns("alpha_pattern", _as_alpha),
            modules_to_save=fields.names("modules_to_save"),
            target_parameters=fields.names("target_parameters"),
        )
        return helper if len(problems) == refused else None

    def rank_of(self, module: str) -> int:
        """A module's rank; raises `AdapterConfigRefused` where the patterns take too long."""
        return _found(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        """A module's alpha; raises like `rank_of`."""
        return _found(self.alpha_pattern, module, self.lora_alpha)

    def scaling_of(self, module: str) -> float:
        """What a module's B is multiplied by: alpha over rank, or over its square root (rsLoRA)."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, path: str) -> bool:
        """Whether the parameter at this path is adapted as such, and not as a linear layer's."""
        return any(path == one or path.endswith(f".{one}") for one in self.target_parameters)

    def key_of(self, module: str) -> str:
        """What patterns match for a linear layer, which may be adapted as a parameter."""
        parameter = f"{module}.weight"
        return parameter if self.targets_parameter(parameter) else module

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """Raise `AdapterDoesNotFit` where a rank is over the engine's maximum."""
        rank = max(self.r, *self.rank_pattern.values(), 0)
        if rank > lora_config.max_lora_rank:
            raise AdapterDoesNotFit(
                f"the config has rank {rank}; this engine's max_lora_rank is "
                f"{lora_config.max_lora_rank}"
            )


def decode_config(raw: bytes, bounds: AdapterBounds) -> dict[str, Any]:
    """The config in a file's bytes; raises `AdapterConfigRefused`."""
    try:
        return decode_object(raw, bounds.config_values_max, bounds.json_depth_max)
    except ValueError as error:
        raise AdapterConfigRefused(f"adapter_config.json is not sound: {error}") from None


class _Fields:
    """A config being read; what is wrong goes into `problems`, and reading goes on."""

    def __init__(
        self, config: Mapping[str, Any], bounds: AdapterBounds, problems: Problems
    ) -> None:
        self._config = config
        self._bounds = bounds
        self._problems = problems

    def refuse(self) -> None:
        """Go through the table, and through what is named like a variant that it doesn't know."""
        for name, allowed, text in REFUSALS:
            if not allowed(self._config.get(name)):
                self._refused(f"{name} is {shown(self._config[name])}; {text}")
        for name, value in self._config.items():
            is_variant = name.startswith("use_") or name.endswith("_config")
            if is_variant and name not in _KNOWN_VARIANTS and not _is_off(value):
                self._refused(f"{shown(name)} is {shown(value)}; this variant is not known")

    def required(self, name: str, read: Callable[[Any], T], otherwise: T) -> T:
        """A field that must be there."""
        if self._config.get(name) is None:
            self._refused(f"{name} is missing; it is required")
            return otherwise
        return self._read(name, self._config[name], read, otherwise)

    def targets(self, otherwise: tuple[str, ...] | str) -> tuple[str, ...] | str:
        """`target_modules`, which may be empty where only parameters are adapted."""
        if not self._config.get("target_modules") and self.names("target_parameters"):
            return ()
        return self.required("target_modules", _as_targets, otherwise)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names; empty where the field is missing or was refused."""
        value = self._config.get(name)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            return ()
        return tuple(value)

    def switch(self, name: str) -> bool:
        """A field that is true or false; false where it is missing."""
        value = self._config.get(name)
        return False if value is None else self._read(name, value, _as_bool, False)

    def patterns(self, name: str, read: Callable[[Any], T]) -> PatternTable[T]:
        """Values by pattern; empty where the field is missing."""
        value = self._config.get(name)
        empty: PatternTable[T] = PatternTable({})
        return empty if value is None else self._read(name, value, self._as_table(read), empty)

    def _as_table(self, read: Callable[[Any], T]) -> Callable[[Any], PatternTable[T]]:
        def table(value: Any) -> PatternTable[T]:
            count_max, length_max = self._bounds.patterns_max, self._bounds.pattern_characters_max
            if not isinstance(value, dict) or len(value) > count_max:
                raise ValueError(f"an object of at most {count_max} patterns is needed")
            if any(len(key) > length_max for key in value):
                raise ValueError(f"patterns of at most {length_max} characters are read")
            return PatternTable({key: read(one) for key, one in value.items()})

        return table

    def _read(self, name: str, value: Any, read: Callable[[Any], T], otherwise: T) -> T:
        try:
            return read(value)
        except (ValueError, OverflowError) as error:
            self._refused(f"{name} is {shown(value)}; {error}")
            return otherwise

    def _refused(self, text: str) -> None:
        self._problems.add(AdapterConfigRefused, text)


def _as_rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("an integer of at least 1 is needed")
    return value


def _as_alpha(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(value)) or not value:
        raise ValueError("a finite number other than 0 is needed")
    return float(value)


def _as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false is needed")
    return value


def _as_targets(value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    raise ValueError("a list of module names, or one pattern, is needed, and not an empty one")


def _found(table: PatternTable[T], module: str, otherwise: T) -> T:
    try:
        found = table.find(module)
    except PatternRefused as error:
        raise AdapterConfigRefused(str(error)) from None
    return otherwise if found is None else found
