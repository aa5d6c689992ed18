"""The text side of a server's base model: its chat template and the texts of its tokens.

Both are files of the model's directory. A server takes and gives token ids and texts of whole
outputs, so commands read these files themselves, as the gateway does.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loradock.cli.context import directory_of, settings_of
from loradock.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from loradock.gateway.inference.model_files import ModelFiles

Message = Mapping[str, str]

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIRECTORY",
        help="The base model's directory on this machine, for its tokenizer and chat template. "
        "Default: the directory that the server of --dir was started with.",
    ),
]
TemplateOption = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Chat template to use. Default: the base model's; an adapter's own is used by the "
        "HTTP gateway only.",
    ),
]


class ModelText:
    """The tokenizer and the chat template of a model."""

    def __init__(self, files: "ModelFiles", directory: str) -> None:
        """Raise `CommandError` if the directory has no tokenizer that can be read."""
        if files.tokenizer is None:
            raise CommandError(
                ExitCode.NOT_FOUND,
                f"{directory} has no tokenizer.json that can be read",
                "name a directory with the model's tokenizer: --model DIRECTORY",
            )
        self._files = files
        self._tokenizer = files.tokenizer

    def token_text(self, token: int) -> str:
        """Return the text of a token, quoted."""
        return repr(self._tokenizer.token_text(token))

    def check_chat(self) -> None:
        """Raise `CommandError` if there is no chat template."""
        if not self._files.sources.default:
            raise CommandError(
                ExitCode.NOT_FOUND,
                self._files.templates.problem or "the model has no chat template",
                "name a file with --chat-template, or use `loradock generate` without --chat",
            )

    def prompt_of(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a chat; raises `CommandError`."""
        from loradock.gateway.inference.chat_template import ChatTemplate, TemplateError

        self.check_chat()
        tokens = self._tokenizer.special_tokens
        try:
            template = ChatTemplate(self._files.sources.default, tokens)
            text = template.render(messages, {"tools": None, "add_generation_prompt": True})
        except (TemplateError, ValueError) as error:
            raise CommandError(ExitCode.USAGE, str(error)) from error
        return tuple(self._tokenizer.encode(text, special=False))


def find_model(ctx: typer.Context, model: Path | None) -> str:
    """Return the directory of the base model as it is known here; empty if it is not."""
    from loradock.cli.last_run import read_last_run

    if model is not None:
        return str(model)
    if settings_of(ctx).address:
        return ""
    last = read_last_run(directory_of(ctx))
    return last.model if last is not None and Path(last.model).is_dir() else ""


def read_model_text(
    ctx: typer.Context, model: Path | None, template: Path | None = None
) -> ModelText:
    """Return the text side of the server's model; raises `CommandError`."""
    from loradock.gateway.inference.model_files import read_model_files

    directory = find_model(ctx, model)
    if not directory:
        raise CommandError(
            ExitCode.NOT_FOUND,
            "the server's model is not known on this machine",
            "name a directory with its tokenizer and chat template: --model DIRECTORY",
        )
    try:
        files = read_model_files(directory, str(template or ""))
    except (OSError, ValueError) as error:
        raise CommandError(ExitCode.USAGE, f"--chat-template {template}: {error}") from error
    return ModelText(files, directory)
