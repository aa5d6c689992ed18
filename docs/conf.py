"""The site of the documents, for Sphinx: `make docs` builds it in build/site.

Pages keep their paths in the repository, so that links hold there and here. No other host is asked,
neither at the build nor by the pages.
"""

from typing import Final

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = html_title = "LoRADock"
root_doc = "README"
include_patterns = [
    *("*.md", "benchmarks/*.md", "deploy/*.md", "docs/*.md", "examples/*.md"),
    "tests/golden/pages/*.md",
]
extensions = ["myst_parser"]
# Anchors are those of GitHub.
myst_heading_anchors = 4
html_theme = "furo"
html_copy_source = html_show_sourcelink = False

CONTENTS: Final = """
```{toctree}
:hidden:
:caption: Use
docs/quickstart
tests/golden/pages/first-hour
docs/serving
docs/operating
docs/policies
docs/fleet
deploy/README
docs/openai-api
docs/from-vllm
docs/guarantees
examples/README
```

```{toctree}
:hidden:
:caption: Reference
docs/glossary
docs/options
docs/client
docs/metrics
tests/golden/pages/errors
docs/wire
SUPPORTED
```

```{toctree}
:hidden:
:caption: Design
ARCHITECTURE
docs/engine-decisions
benchmarks/README
CONTRIBUTING
CHANGELOG
```
"""


def add_contents(_: Sphinx, page: str, source: list[str]) -> None:
    """Add the table of contents, which GitHub would show as code, to the first page."""
    if page == root_doc:
        source[0] += CONTENTS


def setup(app: Sphinx) -> None:
    """Connect to Sphinx."""
    app.connect("source-read", add_contents)
    # Diagrams are shown as their text.
    app.add_lexer("mermaid", TextLexer)
