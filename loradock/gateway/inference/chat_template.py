"""Chat templates: Jinja in a sandbox, from messages to a prompt, and the process that bounds it.

The environment is the one for which models' templates are written: trimmed blocks, loop controls,
the filter `tojson`, and the functions `raise_exception` and `strftime_now`.

An adapter's template is a program from whoever can load adapters. Jinja's sandbox keeps it from
Python's objects, but two nested loops or one multiplication take any time or memory, and nothing
inside a process can end them. So they run in a process that the system ends, `main`. Requests and
answers are lines of JSON. A request is `{"source", "special_tokens"}`, with `messages` and
`variables` if it is to be rendered; the answer is `{"reads_parts"}`, `{"text"}`, `{"error"}`, or
`{"characters"}` of a text that is longer than any prompt. A request that exceeds a bound has no
answer.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from loradock.messages.prompts import PROMPT_CHARACTERS_MAX

CPU_S: Final = 2.0
"""The processor time of one request; other processes on the machine don't count."""
MEMORY_BYTES: Final = 512 << 20
"""The address space of the process."""

_TEMPLATES_MAX: Final = 32
_ERROR_CHARACTERS_MAX: Final = 1000

TEMPLATE_BYTES_MAX: Final = 1 << 20

_ERRORS: Final = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)
"""Errors that expressions of a template can raise."""


class TemplateError(Exception):
    """A template that refuses messages, or can't be applied to them."""


class _RaisedByTemplate(Exception):  # noqa: N818 - named by who raises it
    """The error that `raise_exception` raises in a template."""


class ChatTemplate:
    """A compiled chat template; raises `ValueError` for one with wrong syntax.

    `reads_parts`: the template reads contents as lists of parts; otherwise contents are texts.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > TEMPLATE_BYTES_MAX:
            raise ValueError(f"a chat template of {len(source)} characters is too long")
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.reads_parts: Final = _reads_parts(environment.parse(source))
        except (jinja2.TemplateError, *_ERRORS) as error:
            raise ValueError(f"the chat template can't be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
        """Return the prompt; raises `TemplateError`."""
        try:
            return self._template.render(
                **self._special_tokens, **{**variables, "messages": list(messages)}
            )
        except _RaisedByTemplate as error:
            raise TemplateError(f"the chat template refuses: {error}") from error
        except _ERRORS as error:
            message = f"the chat template can't be applied to these messages: {error}"
            raise TemplateError(message) from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Any) -> Any:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes what is special in HTML.
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _refuse(message: str) -> None:
    raise _RaisedByTemplate(message)


def _strftime_now(pattern: str) -> str:
    """Return the local time in a format of `strftime`."""
    return datetime.now().astimezone().strftime(pattern)


def _reads_parts(tree: jinja2.nodes.Template) -> bool:
    """Return whether a loop of the template runs over the content of a message."""
    return any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node) -> bool:
    match node:
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Filter(node=jinja2.nodes.Node() as inner):
            return _is_content(inner)
        case jinja2.nodes.Name(name="content"):
            return True
    return False


def main() -> int:
    """Answer requests on stdin until it is closed; return the exit status."""
    # Ctrl-C is for the gateway, whose end closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = json.dumps(_answer(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)
    return 0


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = _compiled(request["source"], tuple(sorted(request["special_tokens"].items())))
        if "messages" not in request:
            return {"reads_parts": template.reads_parts}
        text = template.render(request["messages"], request["variables"])
        is_too_long = len(text) > PROMPT_CHARACTERS_MAX
        return {"characters": len(text)} if is_too_long else {"text": text}
    except (TemplateError, ValueError) as error:
        # A template can refuse with a text of any length.
        return {"error": str(error)[:_ERROR_CHARACTERS_MAX]}
    except MemoryError:
        # What other templates hold may be what is missing, so the next request has a new process.
        sys.exit(1)


@lru_cache(maxsize=_TEMPLATES_MAX)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))
