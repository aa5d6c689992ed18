"""How a text becomes one vector, as the saved model says it.

What it is: the kinds of pooling, and what a model saved by sentence-transformers says of its own.
What it is not: the pooling itself (`pooled_model`). One rule: what a saved model needs and is not
served stops the start, because its vectors would be other ones.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.models.tasks import SENTENCE_CONFIG, SENTENCE_MODULES, Task


class Pooling(StrEnum):
    """Which hidden states make a text's vector: their mean, the first token's, or the last's."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


class PoolingOptions(NamedTuple):
    """`pooling` None: the mean, or the last token where tokens see only those before them.

    `normalize`: vectors have length 1. `tokens_max` 0: no limit beside the model's own. `prompt`
    stands before every text; with `pools_prompt` off its tokens have no part in the vector.
    """

    pooling: Pooling | None = None
    normalize: bool = False
    tokens_max: int = 0
    prompt: str = ""
    pools_prompt: bool = True


NOTHING_SAID: Final = PoolingOptions()
"""The options of a model whose files say nothing of pooling."""

_PACKAGE: Final = "sentence_transformers."
_STEPS: Final = ("Transformer", "Pooling", "Normalize")

_POOLINGS: Final = {
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
"""What they are called in a list of modes, and as flags, which older models have."""

_READING: Final[Mapping[str, tuple[object, ...]]] = {
    "do_lower_case": (None, False),
    "transformer_task": (None, "feature-extraction"),
    "module_output_name": (None, "token_embeddings"),
    "processing_kwargs": (None, {}),
}
"""How texts may be read: by key of the first step's file, what is served of its values."""

_STATES: Final = {"method": "forward", "method_output_name": "last_hidden_state"}
"""What a text has to be made of, where that file says it."""


def pooling_options(config: EngineConfig, task: Task) -> PoolingOptions:
    """What the saved model says, and over it what the configuration does.

    Raises `ModelRefused` for a saved model with other steps, or other poolings, than are served,
    and for a configuration that wants of another task what only embedding has.
    """
    if task != "embed":
        if config.pooling != "auto" or config.normalize is not None:
            raise ModelRefused(
                f"pooling or normalize is set, and this model is to {task}; they are for embedding"
            )
        return NOTHING_SAID
    directory = config.model_directory
    chosen = None if config.pooling == "auto" else Pooling(config.pooling)
    saved = PoolingOptions(chosen)
    if (directory / SENTENCE_MODULES).is_file():
        saved = _of_sentence_transformer(directory, chosen)
    return saved if config.normalize is None else saved._replace(normalize=config.normalize)


def _of_sentence_transformer(directory: Path, chosen: Pooling | None) -> PoolingOptions:
    try:
        paths = _paths_of_steps(directory)
        pooling, pools_prompt = chosen, True
        if "Pooling" in paths:
            saved = _read(directory / paths["Pooling"] / "config.json")
            pooling = chosen or _pooling_of(saved, directory)
            pools_prompt = saved.get("include_prompt") is not False
        prompt = _default_prompt(directory)
        if prompt and not pools_prompt and pooling is Pooling.CLS:
            raise ModelRefused(
                f"{directory} pools the first token and leaves its prompt out; which token is the "
                "first then is not agreed on, so that is not served: choose another --pooling"
            )
        tokens_max = _tokens_max(directory)
        return PoolingOptions(pooling, "Normalize" in paths, tokens_max, prompt, pools_prompt)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(
            f"{directory}: {SENTENCE_MODULES} or a file that it names is not as sentence-"
            f"transformers writes it: {type(error).__name__}: {error}"
        ) from error


def _paths_of_steps(directory: Path) -> dict[str, str]:
    """Where the files of each step lie; refused where there are others, or in another order."""
    steps = [(str(step["type"]), str(step["path"])) for step in _read(directory / SENTENCE_MODULES)]
    types = [kind for kind, _ in steps]
    paths = {kind.rpartition(".")[2]: path for kind, path in steps}
    own = all(kind.startswith(_PACKAGE) for kind in types)
    if not own or len(paths) != len(types) or [*paths] != [s for s in _STEPS if s in paths]:
        raise ModelRefused(
            f"{directory} embeds with the steps {', '.join(types)}; served are sentence-"
            f"transformers' own {', '.join(_STEPS)}, in this order"
        )
    if paths.get("Transformer"):
        raise ModelRefused(
            f"{directory} has its weights in {paths['Transformer']!r}; they are read from beside "
            f"{SENTENCE_MODULES}: move them there"
        )
    return paths


def _pooling_of(saved: Mapping[str, Any], directory: Path) -> Pooling:
    """The one pooling that is wanted; where none is, the mean, as everywhere."""
    said = saved.get("pooling_mode")
    if said is None:
        said = [name for name, on in saved.items() if name.startswith("pooling_") and on is True]
    wanted = [said] if isinstance(said, str) else sorted(said)
    others = set(wanted).difference(_POOLINGS)
    if others:
        raise ModelRefused(
            f"{directory} embeds with the poolings {sorted(others)}; served are "
            f"{', '.join(_POOLINGS)}"
        )
    if len(wanted) > 1:
        raise ModelRefused(
            f"{directory} pools by {wanted}; one is served: choose it with --pooling"
        )
    return _POOLINGS[wanted[0]] if wanted else Pooling.MEAN


def _default_prompt(directory: Path) -> str:
    """What is put before every text; empty where the model names nothing."""
    path = directory / SENTENCE_CONFIG
    saved = _read(path) if path.is_file() else {}
    name, prompts = saved.get("default_prompt_name"), saved.get("prompts") or {}
    if name is None:
        return ""
    if name not in prompts:
        raise ModelRefused(
            f"{path} has the default prompt {name!r}, and prompts only for {sorted(prompts)}"
        )
    return str(prompts[name] or "")


def _tokens_max(directory: Path) -> int:
    """How long a text may be, 0 where nothing is said; refused where it is read in other ways.

    The file was named after the kind of model once, and is after BERT since.
    """
    path = min(directory.glob("sentence_*_config.json"), default=None)
    saved = {} if path is None else _read(path)
    texts = saved.get("modality_config", {"text": _STATES}).get("text")
    for key, found, served in (
        *((key, saved.get(key), served) for key, served in _READING.items()),
        ("modality_config", texts, (_STATES,)),
    ):
        if found not in served:
            raise ModelRefused(f"{path} says {key}: {found!r}; that is not served")
    return int(saved.get("max_seq_length") or 0)


def _read(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())
