"""The `chat` command: messages from a terminal, or lines of stdin, and streamed answers."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loradock.cli.context import (
    AdapterOption,
    AsJson,
    InferenceTimeout,
    open_client,
    output_of,
    settings_of,
)
from loradock.cli.exit_codes import CommandError, failure_of
from loradock.cli.inference import SamplingOptions
from loradock.cli.model_text import Message, ModelOption, ModelText, TemplateOption, read_model_text
from loradock.cli.options import with_options
from loradock.messages.errors import LoradockError

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.client import Client

_HELP: Final = """\
/adapter [NAME]  use another adapter for the next answers; without NAME the base model
/system [TEXT]   set the system prompt, or remove it
/clear           forget all messages
/show            print all messages
/quit            end; so does Ctrl-D. Ctrl-C stops an answer, or drops the line
"""

app = typer.Typer()

SystemOption = Annotated[
    str, typer.Option("--system", metavar="TEXT", help="System prompt. Default: none.")
]


@app.command()
@with_options
def chat(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    sampling: SamplingOptions,
    adapter: AdapterOption = None,
    system: SystemOption = "",
    model: ModelOption = None,
    chat_template: TemplateOption = None,
    timeout: InferenceTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Chat with the model: one message per line, /help lists what else can be typed.

    With --json, or if stdin is not a terminal, an error ends the command.
    """
    output = output_of(ctx, as_json)
    text = read_model_text(ctx, model, chat_template)
    text.check_chat()
    fields = {**sampling.fields(), "n": 1, "timeout_s": timeout}
    with open_client(ctx) as client:
        dialogue = Dialogue(client, text, output, fields)
        dialogue.use(adapter)
        dialogue.system = system
        _follow(dialogue, output, settings_of(ctx).context)


def _follow(dialogue: "Dialogue", output: "Output", context: str) -> None:
    is_interactive = sys.stdin.isatty() and not output.as_json
    if is_interactive:
        # It edits the line, and remembers earlier lines.
        import readline  # noqa: F401

        output.note("/help lists what can be typed besides messages")
    while True:
        try:
            line = input(dialogue.prompt(context) if is_interactive else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            # It can come when an answer has just ended: the conversation stays.
            if not is_interactive:
                raise
            output.note("\nCtrl-D ends the chat")
            continue
        if line.strip() == "/quit":
            return
        try:
            dialogue.read(line)
        except (LoradockError, CommandError) as error:
            if not is_interactive:
                raise
            output.failure(failure_of(error))


class Dialogue:
    """The messages so far, and whom they are for."""

    def __init__(
        self, client: "Client", text: ModelText, output: "Output", fields: dict[str, object]
    ) -> None:
        self.adapter: str | None = None
        self.system = ""
        self._client = client
        self._text = text
        self._output = output
        self._fields = fields
        self._messages: list[Message] = []

    def use(self, adapter: str | None) -> None:
        """Use an adapter for the next answers, None for the base model; it must be known."""
        if adapter is not None:
            self._client.show(adapter)
        self.adapter = adapter

    def prompt(self, context: str) -> str:
        """Return what a person sees before a message: the server's name and the adapter."""
        return f"{context + ':' if context else ''}{self.adapter or 'base model'}> "

    def read(self, line: str) -> None:
        """Follow a line: a message, or what `/help` lists; raises `LoradockError`."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "":
                pass
            case "/adapter":
                self.use(rest.strip() or None)
            case "/system":
                self.system = rest.strip()
            case "/clear":
                self._messages.clear()
            case "/show":
                for message in self._all():
                    self._output.text(f"{message['role']}: {message['content']}\n")
            case _ if word.startswith("/"):
                self._output.text(_HELP)
            case _:
                self._ask(line)

    def _all(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages]

    def _ask(self, line: str) -> None:
        """Send a message and print the answer; both are kept unless the request fails."""
        message = {"role": "user", "content": line}
        tokens = self._text.prompt_of([*self._all(), message])
        answer = ""
        with self._client.generate(tokens, self.adapter, **self._fields) as running:  # type: ignore[arg-type]
            try:
                for chunk in running:
                    answer += chunk.text
                    if not self._output.as_json:
                        self._output.text(chunk.text)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self._output.note("\nstopped")
        reply = {"role": "assistant", "content": answer}
        self._messages += [message, reply]
        if self._output.as_json:
            self._output.document({**reply, "adapter": self.adapter})
        else:
            self._output.text("\n")
