"""`GET /`: the page, one file without references to other hosts."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

PAGE: Final = Path(__file__).with_name("index.html")
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.S)


class Page:
    """The endpoint; the browser runs only the script of the file itself."""

    def __init__(self) -> None:
        self._text = PAGE.read_text()
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._text),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    async def page(self, _: Request) -> Response:
        """Answer with the page."""
        return HTMLResponse(self._text, headers=self._headers)


def content_security_policy(page: str) -> str:
    """Return the policy that allows exactly the script and the style of the page."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
