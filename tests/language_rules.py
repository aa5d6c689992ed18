"""Words that the project's prose and names avoid, and a reader of files that finds them.

`python -m tests.language_rules PATH...` prints what it finds below the given paths.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.support.sources import ALL, ROOT, Source, read_sources


class Avoided(NamedTuple):
    """A pattern of prose that is refused, and what to write."""

    pattern: str
    instead: str


PROSE: Final = (
    # The opposite of what is meant: readers take it for "go via".
    Avoided(r"pass(es|ed|ing)? by", "bypass, never"),
    # A person where a thing is meant.
    Avoided(r"who|whom|whoever|somebody|anybody|everybody|nobody", "which, it, an adapter, none"),
    Avoided(r"someone|anyone|everyone|no one", "which, it, a caller, none"),
    Avoided(r"whatever|whichever", "any, regardless of"),
    # Metaphors of talk for messages, values and texts.
    Avoided(r"told|tells?|telling", "reported, answered, shown, specifies"),
    Avoided(r"says?|said|saying", "specifies, states, contains"),
    Avoided(r"asks?|asked|asking", "requests, queries, calls"),
    Avoided(r"a word|good word|last word|be heard|hears?|heard", "a message, an error, receives"),
    # Metaphors of movement for memory and time.
    Avoided(r"lies?|lay|lying", "is stored, is located, is"),
    Avoided(r"goes on|go on|going on|went on|on (its|their) way|gets on", "continues, in flight"),
    Avoided(r"behind", "after"),
    Avoided(r"beside|besides", "next to, concurrently, with"),
    Avoided(r"gives|gave", "returns, provides"),
    Avoided(r"brings?|brought|bringing", "provides, contains, causes"),
    # Terms of the project's first version, replaced by standard ones.
    Avoided(r"wish(es)?|strangers?|ledgers?|desk|ensemble", "goal, request, unknown, the new name"),
    Avoided(r"roomy|books|heirs?|inherits? its name", "growable, counters, successor"),
    Avoided(r"by chance|chance", "randomness"),
    Avoided(r"(so|as) many(?! as\b)", "the number's name"),
    # The module template of the first version.
    Avoided(r"what\s+it\s+is(\s+not)?:|one\s+rule:", "one sentence, then the invariants"),
)
"""Refused in docstrings, comments and texts, in any case of letters."""

NAMES: Final = frozenset(
    {
        *("told", "tell", "tells", "said", "says", "asks", "asked", "ask", "heard", "hear"),
        *("nobody", "somebody", "anybody", "everybody", "whoever", "who", "whom", "whatever"),
        *("wish", "wishes", "desk", "ledger", "books", "handed", "stranger", "strangers"),
        *("ensemble", "agreed", "striving", "resting", "fulfil", "beside", "behind", "lies"),
        *("equip", "equipment", "roomy", "heir", "gives", "brings", "brought", "vanish"),
    }
)
"""Refused as a part of an identifier, between underscores or capitals."""

DOCUMENTS: Final = (
    *("README.md", "ARCHITECTURE.md", "SUPPORTED.md"),
    *("benchmarks/README.md", "examples/README.md", "deploy/README.md"),
    *("docs/openai-api.md", "docs/quickstart.md", "docs/from-vllm.md"),
    *("docs/guarantees.md", "docs/engine-decisions.md", "docs/operating.md"),
    "docs/serving.md",
)

ALLOWED: Final = frozenset(
    {
        # The table itself and its tests.
        *(("tests/language_rules.py", "*"), ("tests/test_language.py", "*")),
        # Refusals of the core are part of the digest: another wording needs another `RULES` number.
        ("controller/core/deadlines.py", "ask"),
        ("controller/core/engine_lifecycle.py", "ask"),
        ("controller/core/inventory.py", "told"),
    }
)
"""Files and words that stay; `*` is any word."""

_PATTERNS: Final = tuple((re.compile(rf"(?<!\w)({one.pattern})(?!\w)", re.I), one) for one in PROSE)
_ANY: Final = re.compile("|".join(pattern.pattern for pattern, _ in _PATTERNS), re.I)
_CODE: Final = re.compile(r"```.*?```|`[^`\n]*`", re.S)
_PARTS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def _docstrings(file: Source) -> Iterator[ast.Constant]:
    """Every string that is a statement: docstrings, and those below a constant."""
    for node in file.nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def _texts(file: Source) -> Iterator[ast.Constant]:
    """Every other string with a space in it: errors, help, events."""
    docstrings = set(map(id, _docstrings(file)))
    for node in file.nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings and " " in node.value:
            yield node


def _prose(file: Source) -> Iterator[tuple[int, str]]:
    """First line and text of every docstring, comment and, outside tests, text."""
    for docstring in _docstrings(file):
        yield docstring.lineno, docstring.value
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    if not file.path.startswith("tests/"):
        for text in _texts(file):
            yield text.lineno, text.value


def _names(file: Source) -> Iterator[tuple[int, str]]:
    """Every name that a file defines: classes, functions, arguments, variables, fields."""
    for node in file.nodes:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def avoided_prose(file: Source) -> Iterator[str]:
    """A line for each refused word in the file's prose."""
    for line, text in _prose(file):
        yield from _refused(file.path, line, text)


def avoided_names(file: Source) -> Iterator[str]:
    """A line for each refused word in a name that the file defines, its own included."""
    for line, name in (*_names(file), (1, file.module.rpartition(".")[2])):
        for part in _PARTS.findall(name):
            if part.lower() in NAMES and not is_allowed(file.path, name):
                yield f"{file.path}:{line}: the name {name!r} has {part.lower()!r} in it"


def is_allowed(path: str, word: str) -> bool:
    """Whether this word may stay in this file."""
    return (path, "*") in ALLOWED or (path, word.lower()) in ALLOWED


def avoided_in_document(path: str, text: str) -> Iterator[str]:
    """A line for each refused word of a Markdown document outside its code."""
    prose = _CODE.sub(lambda code: "\n" * code.group(0).count("\n"), text)
    yield from _refused(path, 1, prose)


def _refused(path: str, first_line: int, text: str) -> Iterator[str]:
    if not _ANY.search(text):
        return
    for pattern, avoided in _PATTERNS:
        for found in pattern.finditer(text):
            if not is_allowed(path, found.group(0)):
                line = first_line + text[: found.start()].count("\n")
                yield f"{path}:{line}: {found.group(0)!r}; write: {avoided.instead}"


def avoided_words(files: list[Source]) -> list[str]:
    """All findings of these files, each once."""
    found = (line for file in files for line in (*avoided_prose(file), *avoided_names(file)))
    return list(dict.fromkeys(found))


def main() -> None:
    """Print the findings below the paths of the command line, or everywhere."""
    paths = tuple(sys.argv[1:]) or ("",)
    print(*avoided_words([f for f in read_sources(ALL) if f.path.startswith(paths)]), sep="\n")
    for path in DOCUMENTS:
        if path.startswith(paths):
            print(*avoided_in_document(path, (ROOT / path).read_text()), sep="\n")


if __name__ == "__main__":
    main()
