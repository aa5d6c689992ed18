"""Chat templates: Jinja in a sandbox, from messages to a prompt.

The environment is the one for which models' templates are written: trimmed blocks, loop controls,
the filter `tojson`, and the functions `raise_exception` and `strftime_now`. Jinja's sandbox keeps a
template from Python's objects, and bounds neither its time nor its memory: see `template_process`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from loradock.gateway.timestamps import formatted_time

TEMPLATE_BYTES_MAX: Final = 1 << 20

_ERRORS: Final = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)
"""What expressions of a template may raise."""


class TemplateError(Exception):
    """A template that refuses messages, or can't be applied to them."""


class _RaisedByTemplate(Exception):  # noqa: N818 - named by who raises it
    """What `raise_exception` raises in a template."""


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
    environment.globals["strftime_now"] = formatted_time
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


def _reads_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether a loop of the template runs over the content of a message."""
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
