"""Options of commands, made from the declarations of `loradock.messages.options`.

An option comes from the command line, else from its environment variable, else from the file of
`--config`, else it has its default.
"""

import difflib
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterator
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from msgspec import NODEFAULT

from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.messages.options import Option, build, options_of

FILE_BYTES_MAX: Final = 1 << 20

Command = Callable[..., None]


def with_options(command: Command) -> Command:
    """Replace each argument whose type declares options by these options.

    The command receives the values as an instance of the type. Options that are not common are
    shown by `--help-all` only, which a command with some of them gets.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: one.annotation
        for name, one in signature.parameters.items()
        if inspect.isclass(one.annotation) and options_of_argument(one.annotation)
    }
    found = [option for owner in groups.values() for option in options_of(owner)]

    @functools.wraps(command)
    def run(*positional: Any, **values: Any) -> None:
        try:
            built = {name: build(owner, values) for name, owner in groups.items()}
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        taken = {option.field for option in found} | {_HELP_ALL}
        others = {name: value for name, value in values.items() if name not in taken}
        command(*positional, **others, **built)

    kept = [one for name, one in signature.parameters.items() if name not in groups]
    are_all_common = all(option.is_common for option in found) or not any(
        option.is_common for option in found
    )
    shown = [_parameter(option, are_all_common or option.is_common) for option in found]
    more = [] if are_all_common else [_help_all()]
    run.former_flags = {  # type: ignore[attr-defined]
        option.former: option.flag for option in found if option.former
    }
    # typer makes the options of a command from its signature.
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*kept, *shown, *more]
    )
    return run


def options_of_argument(annotation: Any) -> tuple[Option, ...]:
    """Return the options that a command's argument stands for; none for any other type."""
    is_declared = hasattr(annotation, "__struct_fields__") or hasattr(
        annotation, "__dataclass_fields__"
    )
    return options_of(annotation) if is_declared else ()


def _parameter(option: Option, is_shown: bool) -> Parameter:
    kind, default, bounds = _type(option)
    states_default = "Default:" in option.help or "Needed." in option.help
    # A switch that can be left undecided, or is on by default, has a second flag.
    can_be_off = option.kind is bool and (option.is_optional or option.default is True)
    flags = f"{option.flag}/--no-{option.flag[2:]}" if can_be_off else option.flag
    declared = typer.Option(
        *(option.flags or flags).split(","),
        help=option.help,
        rich_help_panel=option.panel,
        metavar=option.metavar or None,
        envvar=option.variable or None,
        show_envvar=False,
        show_default=not states_default and default not in (None, "", False, NODEFAULT),
        hidden=not is_shown,
        **bounds,
    )
    return Parameter(
        option.field,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if option.default is NODEFAULT else default,
        annotation=Annotated[kind, declared],
    )


def _type(option: Option) -> tuple[Any, Any, dict[str, Any]]:
    """Return the type, the default and the bounds that typer gets; `Option.parse` does the rest."""
    if option.is_repeated:
        has_numbers = option.kind is int and not option.is_pairs
        return (list[int] if has_numbers else list[str]) | None, None, {}
    if option.unit == "bytes" or option.names or option.is_automatic:
        return str, option.shown(option.default), {}
    if option.kind not in (int, float):
        kind = option.kind | None if option.is_optional else option.kind
        return kind, option.default, {}
    scale = 1000 if option.is_scaled else 1
    bounds = {
        name: bound / scale if option.is_scaled else bound
        for name, bound in (("min", option.ge), ("max", option.le))
        if bound is not None
    }
    kind = float if option.is_scaled else option.kind
    default = option.default / scale if option.is_scaled else option.default
    return (kind | None if option.is_optional else kind), default, bounds


_HELP_ALL: Final = "help_all"


def _help_all() -> Parameter:
    declared = typer.Option(
        "--help-all",
        is_eager=True,
        callback=_show_all,
        help="Show every option and exit; docs/options.md has them too.",
    )
    annotation = Annotated[bool, declared]
    return Parameter(_HELP_ALL, Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def _show_all(ctx: typer.Context, is_requested: bool) -> None:
    if not is_requested:
        return
    hidden: list[Any] = [one for one in ctx.command.params if getattr(one, "hidden", False)]
    try:
        for one in hidden:
            one.hidden = False
        typer.echo(ctx.get_help())
    finally:
        for one in hidden:
            one.hidden = True
    raise typer.Exit


def with_each_value_flagged(args: list[str], flags: set[str]) -> Iterator[str]:
    """Yield the words of a command line, with a flag of `flags` before each of its values.

    An option that can be repeated takes several values at once, as vLLM's options do.
    """
    flag, has_value = "", True
    for word in args:
        name, equals, _ = word.partition("=")
        if not has_value:
            has_value = True
        elif name in flags:
            flag, has_value = name, bool(equals)
        elif word.startswith("-"):
            flag = ""
        elif flag:
            yield flag
        yield word


def read_config_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults of all options of the command."""
    if path is None:
        return None
    params = {
        name.removeprefix("--"): one
        for one in ctx.command.params
        for name in one.opts
        if name.startswith("--") and name not in ("--config", "--help", "--help-all")
    }
    found: dict[str, Any] = {}
    for key, value in _file_values(path).items():
        option = key.replace("_", "-")
        if option not in params:
            former = getattr(ctx.command.callback, "former_flags", {}).get(f"--{option}", "")
            hint = f"did you mean {former[2:]!r}?" if former else _hint(option, params)
            raise _refused(path, f"{key!r} is not an option", hint)
        if isinstance(value, dict):
            raise _refused(path, f"{key!r} must be a value, got a table")
        one = params[option]
        is_single = getattr(one, "multiple", False) and not isinstance(value, list)
        found[str(one.name)] = [value] if is_single else value
    ctx.default_map = found
    return path


def _file_values(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.loads(file.read(FILE_BYTES_MAX).decode())
    except OSError as error:
        raise _refused(path, str(error.strerror)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _refused(path, f"it is not TOML: {error}") from error


def _refused(path: Path, reason: str, hint: str = "") -> CommandError:
    return CommandError(ExitCode.USAGE, f"--config {path}: {reason}", hint)


def _hint(option: str, options: dict[str, Any]) -> str:
    if option == "dir":
        return "name the directory before the command: loradock --dir DIRECTORY serve"
    close = difflib.get_close_matches(option, options, 1)
    return f"did you mean {close[0]!r}?" if close else "`loradock serve --help-all` lists them"
