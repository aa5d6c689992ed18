"""How the tokens of a text become one vector.

What it is: the kinds of pooling, and what a model saved by sentence-transformers says of its own.
What it is not: the pooling itself (`pooled_model`). One rule: what a saved model needs and is not
served stops the start, because its vectors would be other ones.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.tasks import SENTENCE_MODULES


class Pooling(StrEnum):
    """Which hidden states make a text's vector: their mean, the first token's, or the last's."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


class PoolingOptions(NamedTuple):
    """`pooling` None: the mean, or the last token where tokens see only those before them.

    `normalize`: vectors have length 1. `tokens_max` 0: no limit beside the model's own.
    """

    pooling: Pooling | None = None
    normalize: bool = False
    tokens_max: int = 0


NOTHING_SAID: Final = PoolingOptions()
"""The options of a model whose files say nothing of pooling."""

_FLAGS: Final = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_SERVED_MODULES: Final = ("Transformer", "Pooling", "Normalize")


def pooling_options(config: EngineConfig) -> PoolingOptions:
    """What the saved model says, and over it what the configuration does.

    Raises `ModelRefused` for a saved model with other steps, or other poolings, than are served.
    """
    directory = config.model_directory
    chosen = None if config.pooling == "auto" else Pooling(config.pooling)
    saved = PoolingOptions(chosen)
    if (directory / SENTENCE_MODULES).is_file():
        saved = _of_sentence_transformer(directory, chosen)
    return saved if config.normalize is None else saved._replace(normalize=config.normalize)


def _of_sentence_transformer(directory: Path, chosen: Pooling | None) -> PoolingOptions:
    try:
        paths = {
            str(module["type"]).rpartition(".")[2]: str(module["path"])
            for module in _read(directory / SENTENCE_MODULES)
        }
        _refuse_others(directory, "steps", set(paths).difference(_SERVED_MODULES))
        pooling = chosen
        if chosen is None and "Pooling" in paths:
            pooling = _pooling_of(_read(directory / paths["Pooling"] / "config.json"), directory)
        limits = directory / "sentence_bert_config.json"
        reading = _read(limits) if limits.is_file() else {}
        if reading.get("do_lower_case"):
            raise ModelRefused(f"{directory} lowers the case of its texts; that is not served")
        tokens_max = int(reading.get("max_seq_length") or 0)
        return PoolingOptions(pooling, "Normalize" in paths, tokens_max)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(
            f"{directory}: {SENTENCE_MODULES} or a file that it names is not as sentence-"
            f"transformers writes it: {type(error).__name__}: {error}"
        ) from error


def _pooling_of(saved: dict[str, Any], directory: Path) -> Pooling:
    wanted = {name for name, on in saved.items() if name.startswith("pooling_") and on is True}
    _refuse_others(directory, "poolings", wanted.difference(_FLAGS))
    if len(wanted) != 1:
        raise ModelRefused(
            f"{directory} pools by {sorted(wanted)}; one is served: choose it with --pooling"
        )
    return _FLAGS[wanted.pop()]


def _refuse_others(directory: Path, what: str, others: set[str]) -> None:
    if others:
        served = _SERVED_MODULES if what == "steps" else tuple(_FLAGS)
        raise ModelRefused(
            f"{directory} embeds with the {what} {sorted(others)}; served are {', '.join(served)}"
        )


def _read(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())
