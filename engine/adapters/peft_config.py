"""The content of an `adapter_config.json`: the fields that are used, and those that are refused.

A field that would change the result and is not supported must be refused. A field that only
describes training is ignored.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from loradock.engine.adapters.bounded_parsing import PatternRefused, PatternTable, decode_object
from loradock.engine.adapters.directory import open_adapter
from loradock.engine.adapters.lora_request import tensorizer_directory
from loradock.engine.adapters.problems import Problems, shown
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds, LoRAConfig
from loradock.engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from loradock.messages.engine_options import LORA_RANKS

T = TypeVar("T")


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


HARMLESS_INITIALISATIONS: Final = ("gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that set A and B alone; booleans and null do too."""

BASE_CHANGING_INITIALISATIONS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values, or their beginnings, with which PEFT also subtracts the product of A and B from the base
weights (LoftQ: quantises them), so that an adapter as it was trained is wrong for the base model.
`save_pretrained` with `path_initial_model_for_weight_conversion` appends the first A and B to the
last, doubles rank and alpha, and saves true as the value: such an adapter is a plain one."""


def _leaves_base(value: Any) -> bool:
    return not str(value).lower().startswith(BASE_CHANGING_INITIALISATIONS)


def _is_known_initialisation(value: Any) -> bool:
    """Return whether PEFT has the value; those that change the base have a separate rule."""
    if isinstance(value, str):
        return value.lower() in HARMLESS_INITIALISATIONS or not _leaves_base(value)
    return value is None or isinstance(value, bool)


def _are_layers(value: Any) -> bool:
    layers = value if isinstance(value, list) else [value]
    return value is None or all(type(one) is int for one in layers)


CLASSIFICATION_HEADS: Final = ("classifier", "score")
"""Heads of classifiers; PEFT adds both names to `modules_to_save` for any classifier."""


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
    return _is_off(value) or is_list


def _is_name_or_names(value: Any) -> bool:
    return isinstance(value, str) or _are_names(value)


def _are_token_indices(value: Any) -> bool:
    lists = list(value.values()) if isinstance(value, dict) else [value]
    return _is_off(value) or all(map(_are_token_ids, lists))


def _are_token_ids(value: Any) -> bool:
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        return False
    return 0 < len(value) == len(set(value))


BIASES: Final = ("none", "all", "lora_only")
"""The values of `bias`: which trained biases an adapter contains."""


_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
"""Names in `layers_pattern` without a character that is special in PEFT's pattern."""


class FieldRule(NamedTuple):
    """A field whose value must be `allowed`, and the reason and advice for any other value."""

    field: str
    allowed: Callable[[Any], bool]
    text: str


FIELD_RULES: Final = (
    FieldRule(
        "peft_type",
        lambda v: v in (None, "LORA"),
        "only LORA adapters are served: other methods are no low-rank product",
    ),
    FieldRule("bias", lambda v: v in (None, *BIASES), f"the biases that PEFT trains are {BIASES}"),
    FieldRule(
        "alora_invocation_tokens",
        lambda v: v is None,
        "activated LoRA starts within a prompt, and a row has one adapter",
    ),
    FieldRule(
        "layer_replication",
        _is_off,
        "it copies layers of the base model, which this model does not have; train an adapter for "
        "the layers that are there",
    ),
    FieldRule(
        "init_lora_weights",
        _leaves_base,
        "training began by changing the base weights; convert the adapter to plain LoRA when "
        "saving it (path_initial_model_for_weight_conversion), or set true if the served base "
        "model has the changed weights",
    ),
    FieldRule(
        "init_lora_weights",
        _is_known_initialisation,
        "whether this initialisation changes the base weights is not known; those that do not are "
        f"true, false, {', '.join(HARMLESS_INITIALISATIONS)}",
    ),
    FieldRule("layers_to_transform", _are_layers, "it must be an integer or a list of integers"),
    FieldRule("layers_pattern", _is_name_or_names, "it must be a name or a list of names"),
    FieldRule("exclude_modules", _is_name_or_names, "it must be a pattern or a list of names"),
    FieldRule(
        "modules_to_save",
        _are_names,
        "it must be a list of names",
    ),
    FieldRule("target_parameters", _are_names, "it must be a list of names"),
    FieldRule(
        "trainable_token_indices",
        _are_token_indices,
        "it must have distinct token ids, as a list or as an object of lists by module",
    ),
    FieldRule("use_qalora", _is_off, "QA-LoRA pools the inputs of A; convert it to plain LoRA"),
    FieldRule(
        "use_bdlora", _is_off, "blocks of A and B are not stored as such; expand them to plain LoRA"
    ),
    FieldRule("kasa_config", _is_off, "KaSA changes the base weights and is not served"),
    FieldRule(
        "monteclora_config", _is_off, "MonteCLoRA draws its weights at random; save plain LoRA"
    ),
    FieldRule(
        "arrow_config",
        _is_off,
        "arrow routing chooses adapters by token; a mapping names them here",
    ),
    FieldRule("auto_map", _is_off, "a config that names code is not read"),
    FieldRule("trust_remote_code", _is_off, "a config that names code is not read"),
)
"""Rules for single fields. PEFT's `auto_mapping` and `megatron_core` name classes too, in every
adapter that it saves; those are never imported."""

_TRAINING_ONLY: Final = (
    "use_rslora",
    "use_dora",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "megatron_config",
    "runtime_config",
)
_KNOWN_VARIANTS: Final = frozenset([refusal.field for refusal in FIELD_RULES]).union(_TRAINING_ONLY)
"""Fields with names like those of PEFT's variants that are checked above, read, or unused here."""


class ModuleScaling(NamedTuple):
    """A module's rank and alpha, and the factor of its B."""

    rank: int
    alpha: float
    scaling: float


@dataclass(frozen=True, eq=False)
class PEFTHelper:
    """The fields of a PEFT config that determine the result.

    `target_modules`: names, or one pattern, as in the config; a pattern is not evaluated, because
    the tensors' names determine the adapted modules. `exclude_modules`: targets that are not
    adapted, in the same form. `layers_to_transform`: the only layers that are adapted; None for
    all. `layers_pattern`: the names of the lists that these layers are in; empty for any list.
    `modules_to_save`: modules that the adapter replaces. `target_parameters`: adapted
    parameters, by path or its end. `base_model_name`: for error texts only. `token_indices`: the
    tokens of trained rows, by the end of an embedding's or head's path; a list alone has the empty
    end, which every path has. `ensure_weight_tying`: what is saved for a tied module is for all
    modules of the tie. A program without a config file passes `r`, `lora_alpha` and
    `target_modules`; lists and dicts are taken as they are in a config. Raises
    `AdapterConfigRefused` for a wrong rank or alpha.
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: PatternTable[int] = field(default_factory=lambda: PatternTable({}))
    alpha_pattern: PatternTable[float] = field(default_factory=lambda: PatternTable({}))
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    base_model_name: str = ""
    max_position_embeddings: int | None = None
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: frozenset[int] | None = None
    layers_pattern: tuple[str, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ensure_weight_tying: bool = False

    def __post_init__(self) -> None:
        try:
            _as_rank(self.r), _as_alpha(self.lora_alpha)
        except ValueError as error:
            raise AdapterConfigRefused(
                f"r is {shown(self.r)} and lora_alpha {shown(self.lora_alpha)}; {error}"
            ) from None
        for name in ("rank_pattern", "alpha_pattern"):
            if isinstance(patterns := getattr(self, name), Mapping):
                object.__setattr__(self, name, PatternTable(patterns))
        names_of = ("target_modules", "modules_to_save", "target_parameters", "exclude_modules")
        for name in names_of:
            if not isinstance(names := getattr(self, name), str):
                object.__setattr__(self, name, tuple(names or ()))

    @classmethod
    def from_local_dir(
        cls,
        lora_path: str,
        max_position_embeddings: int | None = None,
        tensorizer_config_dict: Mapping[str, Any] | None = None,
    ) -> "PEFTHelper":
        """Return a directory's config; raises like `from_dict` and `open_adapter`.

        `max_position_embeddings` is kept for the caller; no adapter depends on it.
        `tensorizer_config_dict`: see `tensorizer_directory`. Pickled weights next to the config are
        not read here, so they are not refused.
        """
        directory = tensorizer_directory(lora_path, tensorizer_config_dict)
        with open_adapter(directory, [Path(directory)], allow_pickled=True) as files:
            config = decode_config(files.read_config(DEFAULT_BOUNDS), DEFAULT_BOUNDS)
        helper = cls.from_dict(config)
        return replace(helper, max_position_embeddings=max_position_embeddings)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "PEFTHelper":
        """Return a config; raises `AdapterConfigRefused` with all its problems."""
        problems = Problems(DEFAULT_BOUNDS.problems_max)
        helper = cls.read(config, DEFAULT_BOUNDS, problems)
        if helper is None or problems:
            raise problems.error()
        return helper

    @classmethod
    def read(
        cls, config: Mapping[str, Any], bounds: AdapterBounds, problems: Problems
    ) -> "PEFTHelper | None":
        """Return a config, or None if it can't be read; add what is wrong to `problems`."""
        fields = _Fields(config, bounds, problems)
        fields.check_rules()
        refused = len(problems)
        no_targets: tuple[str, ...] | str = ()
        helper = cls(
            r=fields.required("r", _as_rank, 1),
            lora_alpha=fields.required("lora_alpha", _as_alpha, 1.0),
            target_modules=fields.targets(no_targets),
            use_rslora=fields.switch("use_rslora"),
            fan_in_fan_out=fields.switch("fan_in_fan_out"),
            rank_pattern=fields.patterns("rank_pattern", _as_rank),
            alpha_pattern=fields.patterns("alpha_pattern", _as_alpha),
            modules_to_save=fields.names("modules_to_save"),
            target_parameters=fields.names("target_parameters"),
            base_model_name=fields.text("base_model_name_or_path"),
            use_dora=fields.switch("use_dora"),
            lora_bias=fields.switch("lora_bias"),
            bias=fields.text("bias") or "none",
            exclude_modules=fields.text("exclude_modules") or fields.names("exclude_modules"),
            layers_to_transform=fields.layers(),
            layers_pattern=fields.lists_of_layers(),
            token_indices=_token_indices(config.get("trainable_token_indices")),
            ensure_weight_tying=fields.switch("ensure_weight_tying"),
        )
        return helper if len(problems) == refused else None

    @property
    def has_exclusions(self) -> bool:
        """True if some targets may not be adapted."""
        return bool(self.exclude_modules)

    @property
    def selects_by_names(self) -> bool:
        """True if names alone decide which modules are adapted, and no regular expression.

        A pattern is not evaluated: it could take any time.
        """
        patterns = (self.target_modules, self.exclude_modules)
        is_plain = all(_PLAIN_NAME.fullmatch(name) for name in self.layers_pattern)
        return is_plain and not any(isinstance(one, str) for one in patterns)

    @property
    def vllm_lora_scaling_factor(self) -> float:
        """The factor of B for modules that no pattern matches."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def vllm_max_position_embeddings(self) -> int | None:
        """The same as `max_position_embeddings`."""
        return self.max_position_embeddings

    def of_module(self, module: str) -> ModuleScaling:
        """Return a module's rank, alpha and scaling, patterns included.

        The scaling is alpha over rank, or over its square root (rsLoRA). Raises
        `AdapterConfigRefused` if patterns need too many steps.
        """
        rank = _value_for(module, "rank_pattern", self.rank_pattern, self.r)
        alpha = _value_for(module, "alpha_pattern", self.alpha_pattern, self.lora_alpha)
        return ModuleScaling(rank, alpha, alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def trained_tokens_of(self, module: str) -> tuple[int, ...] | None:
        """Return the tokens of a module's trained rows in their order; None if it has none.

        Raises `AdapterConfigRefused` if keys for different tokens match the module.
        """
        found = {ids for end, ids in self.token_indices.items() if module.endswith(end)}
        if len(found) > 1:
            raise AdapterConfigRefused(
                f"trainable_token_indices has several keys for {module}, with different tokens; "
                "one is needed"
            )
        return found.pop() if found else None

    def targets_parameter(self, path: str) -> bool:
        """Return whether the parameter at this path is adapted instead of its linear layer."""
        return any(path == one or path.endswith(f".{one}") for one in self.target_parameters)

    def key_of(self, module: str) -> str:
        """Return the path that patterns match for a linear layer or its adapted parameter."""
        parameter = f"{module}.weight"
        return parameter if self.targets_parameter(parameter) else module

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """Raise `AdapterDoesNotFit` if a rank exceeds the engine's maximum."""
        rank = max(self.r, *self.rank_pattern.values(), 0)
        if rank > lora_config.max_lora_rank:
            enough = next((one for one in LORA_RANKS if one >= rank), 0)
            advice = f"the largest rank that can be served is {LORA_RANKS[-1]}"
            if enough:
                advice = f"start it with max_lora_rank={enough} (loradock serve --max-lora-rank "
                advice += f"{enough})"
            raise AdapterDoesNotFit(
                f"the config has rank {shown(rank)}; this engine's max_lora_rank is "
                f"{lora_config.max_lora_rank}: {advice}"
            )


def decode_config(raw: bytes, bounds: AdapterBounds) -> dict[str, Any]:
    """Decode a config file; raises `AdapterConfigRefused`."""
    try:
        return decode_object(raw, bounds.config_values_max, bounds.json_depth_max)
    except ValueError as error:
        raise AdapterConfigRefused(f"adapter_config.json is malformed: {error}") from None


class _Fields:
    """Reads fields of a config; adds problems to `problems` and then returns a default."""

    def __init__(
        self, config: Mapping[str, Any], bounds: AdapterBounds, problems: Problems
    ) -> None:
        self._config = config
        self._bounds = bounds
        self._problems = problems

    def check_rules(self) -> None:
        """Apply `FIELD_RULES`, and refuse other fields that are named like variants of LoRA."""
        for name, allowed, text in FIELD_RULES:
            if not allowed(self._config.get(name)):
                self._refused(f"{name} is {shown(self._config[name])}; {text}")
        for name, value in self._config.items():
            is_variant = name.startswith("use_") or name.endswith("_config")
            if is_variant and name not in _KNOWN_VARIANTS and not _is_off(value):
                self._refused(
                    f"{shown(name)} is {shown(value)}; this variant of LoRA is not supported"
                )

    def required(self, name: str, read: Callable[[Any], T], default: T) -> T:
        """Read a required field."""
        if self._config.get(name) is None:
            self._refused(f"{name} is missing; it is required")
            return default
        return self._read(name, self._config[name], read, default)

    def targets(self, default: tuple[str, ...] | str) -> tuple[str, ...] | str:
        """Read `target_modules`, which may be empty if only parameters are adapted."""
        if not self._config.get("target_modules") and self.names("target_parameters"):
            return ()
        return self.required("target_modules", _as_targets, default)

    def names(self, name: str) -> tuple[str, ...]:
        """Read a list of names; empty if it is missing or malformed."""
        value = self._config.get(name)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            return ()
        return tuple(value)

    def lists_of_layers(self) -> tuple[str, ...]:
        """Read `layers_pattern`; empty if it is missing or malformed."""
        text, names = self.text("layers_pattern"), self.names("layers_pattern")
        if len(names) > self._bounds.patterns_max:
            self._refused(
                f"layers_pattern has {len(names)} names; at most {self._bounds.patterns_max} are "
                "read"
            )
        return (text,) if text else names

    def layers(self) -> frozenset[int] | None:
        """Read `layers_to_transform`; None, for all layers, if it is missing or malformed."""
        value = self._config.get("layers_to_transform")
        if value is None or value == [] or not _are_layers(value):
            return None
        return frozenset(value if isinstance(value, list) else [value])

    def text(self, name: str) -> str:
        """Read a string; empty if it is missing or malformed."""
        value = self._config.get(name)
        return value if isinstance(value, str) else ""

    def switch(self, name: str) -> bool:
        """Read a boolean; False if it is missing."""
        value = self._config.get(name)
        return False if value is None else self._read(name, value, _as_bool, False)

    def patterns(self, name: str, read: Callable[[Any], T]) -> PatternTable[T]:
        """Read values by pattern; empty if the field is missing."""
        value = self._config.get(name)
        empty: PatternTable[T] = PatternTable({})
        return empty if value is None else self._read(name, value, self._as_table(read), empty)

    def _as_table(self, read: Callable[[Any], T]) -> Callable[[Any], PatternTable[T]]:
        def table(value: Any) -> PatternTable[T]:
            count_max, length_max = self._bounds.patterns_max, self._bounds.pattern_characters_max
            if not isinstance(value, dict) or len(value) > count_max:
                raise ValueError(f"it must be an object of at most {count_max} patterns")
            if any(len(key) > length_max for key in value):
                raise ValueError(f"patterns may have at most {length_max} characters")
            return PatternTable({key: read(one) for key, one in value.items()})

        return table

    def _read(self, name: str, value: Any, read: Callable[[Any], T], default: T) -> T:
        try:
            return read(value)
        except (ValueError, OverflowError) as error:
            self._refused(f"{name} is {shown(value)}; {error}")
            return default

    def _refused(self, text: str) -> None:
        self._problems.add(AdapterConfigRefused, text)


def _token_indices(value: Any) -> dict[str, tuple[int, ...]]:
    if _is_off(value) or not _are_token_indices(value):
        return {}
    by_end = value if isinstance(value, dict) else {"": value}
    return {end: tuple(ids) for end, ids in by_end.items()}


def _as_rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("it must be an integer of at least 1")
    return value


def _as_alpha(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(value)) or not value:
        raise ValueError("it must be a finite number other than 0")
    return float(value)


def _as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


def _as_targets(value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    raise ValueError("it must be a non-empty list of module names, or a pattern")


def _value_for(module: str, field: str, table: PatternTable[T], default: T) -> T:
    try:
        found = table.find(module)
    except PatternRefused as error:
        raise AdapterConfigRefused(f"{field} has {error}") from None
    return default if found is None else found
