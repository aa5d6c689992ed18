"""The options of `generate` that become fields of `loradock.messages.prompts.Sampling`."""

from pathlib import Path
from typing import Any, Final

import typer
from typer.models import OptionInfo

from loradock.cli.options.groups import OptionGroup, parameter
from loradock.messages.prompts import LOGPROBS_MAX, N_MAX, Sampling, Structure

_PANEL: Final = "Sampling"
_STRUCTURES: Final = {"json_schema": "json_schema", "regex": "regex", "choice": "choice"}


def _option(*flags: str, text: str, **shown: Any) -> OptionInfo:
    option: OptionInfo = typer.Option(*flags, help=text, rich_help_panel=_PANEL, **shown)
    return option


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        return int(token), float(bias if separator else "")
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not TOKEN=BIAS, such as 42=-5.5") from None


_FIELDS: Final[dict[str, tuple[Any, Any, OptionInfo]]] = {
    "max_tokens": (
        int | None,
        None,
        _option(
            min=1,
            metavar="NUMBER",
            text="Largest number of output tokens. Default: 128, or as many as the model's context "
            "leaves for the prompt.",
        ),
    ),
    "temperature": (
        float,
        0.0,
        _option(
            min=0,
            max=100,
            text="Sampling temperature; 0 always chooses the most likely token. Default: 0.",
        ),
    ),
    "top_k": (
        int,
        0,
        _option(
            min=0,
            metavar="K",
            text="Sample only from the K most likely tokens; 0 for all. Default: 0.",
        ),
    ),
    "top_p": (
        float,
        1.0,
        _option(
            min=0,
            max=1,
            metavar="P",
            text="Sample only from the smallest set of most likely tokens whose probabilities sum "
            "to P; 1 for all.",
        ),
    ),
    "min_p": (
        float,
        0.0,
        _option(
            min=0,
            max=1,
            metavar="P",
            text="Sample only from tokens with at least P times the largest probability. "
            "Default: 0.",
        ),
    ),
    "seed": (
        int | None,
        None,
        _option(
            min=0,
            metavar="NUMBER",
            text="Seed that makes sampling repeatable. Default: random.",
        ),
    ),
    "n": (
        int,
        1,
        _option("--n", "-n", min=1, max=N_MAX, text="Number of outputs of the prompt."),
    ),
    "presence_penalty": (
        float,
        0.0,
        _option(
            min=-2,
            max=2,
            text="Subtract this from the logit of each token that is in the output already. "
            "Default: 0.",
        ),
    ),
    "frequency_penalty": (
        float,
        0.0,
        _option(
            min=-2,
            max=2,
            text="Subtract this from the logit of each token once per occurrence in the output. "
            "Default: 0.",
        ),
    ),
    "repetition_penalty": (
        float,
        1.0,
        _option(
            min=0.01,
            max=100,
            text="Divide positive logits of tokens that have occurred by this, and multiply "
            "negative ones by it; 1 changes nothing.",
        ),
    ),
    "logit_bias": (
        list[str] | None,
        None,
        _option(
            metavar="TOKEN=BIAS",
            text="Add BIAS to the logit of the token with the number TOKEN, for example 42=-5.5; "
            "repeat for several.",
        ),
    ),
    "min_tokens": (int, 0, _option(min=0, text="Smallest number of output tokens. Default: 0.")),
    "stop": (
        list[str] | None,
        None,
        _option(
            metavar="TEXT",
            text="End the output before this text; repeat for several. Default: none.",
        ),
    ),
    "include_stop": (
        bool,
        False,
        _option("--include-stop", text="Print the text of --stop that ended the output, too."),
    ),
    "stop_token_ids": (
        list[int] | None,
        None,
        _option(
            "--stop-token-id",
            min=0,
            metavar="TOKEN",
            text="End the output before this token; repeat for several. Default: none.",
        ),
    ),
    "ignore_eos": (
        bool,
        False,
        _option("--ignore-eos", text="Continue after the model's own end token."),
    ),
    "skip_special_tokens": (
        bool,
        True,
        _option(
            "--skip-special-tokens/--special-tokens",
            text="Leave special tokens out of the text, or print them.",
        ),
    ),
    "logprobs": (
        int | None,
        None,
        _option(
            min=0,
            max=LOGPROBS_MAX,
            metavar="NUMBER",
            text="Print each token's log-probability, and those of the NUMBER most likely ones.",
        ),
    ),
    "prompt_logprobs": (
        int | None,
        None,
        _option(
            min=0,
            max=LOGPROBS_MAX,
            metavar="NUMBER",
            text="Print the log-probability of each token of the prompt, and those of the NUMBER "
            "most likely ones.",
        ),
    ),
    "json_schema": (
        str | None,
        None,
        _option(
            metavar="JSON|FILE",
            text="Generate JSON that this schema allows: the schema itself, or its file; {} allows "
            "any JSON. This, --regex and --choice need the extra `structured`.",
        ),
    ),
    "regex": (
        str | None,
        None,
        _option(
            metavar="PATTERN",
            text="Generate a text that matches this regular expression as a whole.",
        ),
    ),
    "choice": (
        list[str] | None,
        None,
        _option(metavar="TEXT", text="Generate one of these texts; repeat for each."),
    ),
}


def _build(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `Sampling` that differ from their defaults."""
    structure = _structure(values)
    sampling = {name: value for name, value in values.items() if name not in _STRUCTURES}
    sampling["max_tokens"] = values["max_tokens"] or 0
    sampling["logit_bias"] = tuple(map(_bias, values["logit_bias"] or ()))
    sampling["stop"] = tuple(values["stop"] or ())
    sampling["stop_token_ids"] = tuple(values["stop_token_ids"] or ())
    sampling["structure"] = structure
    defaults = Sampling()
    return {name: one for name, one in sampling.items() if one != getattr(defaults, name)}


def _structure(values: dict[str, Any]) -> Structure | None:
    given = [name for name in _STRUCTURES if values[name]]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise typer.BadParameter(f"{flags} exclude each other")
    if values["json_schema"]:
        return Structure("json_schema", _schema(values["json_schema"]))
    if values["regex"]:
        return Structure("regex", values["regex"])
    return Structure("choice", choices=tuple(values["choice"])) if values["choice"] else None


def _schema(value: str) -> str:
    """Return a JSON schema, which `value` is or names a file of."""
    if value.lstrip().startswith(("{", "true", "false")):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--json-schema is neither JSON nor a file: {error}") from error


SAMPLING: Final = OptionGroup(
    tuple(parameter(name, *field) for name, field in _FIELDS.items()), _build
)
"""The sampling options; a command receives `SamplingOptions`."""
