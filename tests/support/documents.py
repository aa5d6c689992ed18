"""Generated parts of documents, each between two marks."""


def between_marks(text: str, begin: str, end: str, content: str) -> str:
    """Return `text` with `content` between two marks; raises `ValueError` if one is missing."""
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the marks {begin!r} and {end!r} are missing")
    return f"{before}{begin}\n{content}\n{end}{after}"
