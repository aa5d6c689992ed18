"""Generated text as it arrives: one output at once, several one after another."""

from loradock.cli.output import Output
from loradock.messages.requests import TokensStreamed
from loradock.messages.views import TokenLogprob


class GeneratedText:
    """Prints the chunks of a generation with `count` outputs.

    The text of one output is printed as it arrives, and its log-probabilities after it. Several
    outputs are printed whole, each below its number, as they end.
    """

    def __init__(self, output: Output, count: int) -> None:
        self._output = output
        self._count = count
        self._texts = [""] * count
        self._prompt: tuple[TokenLogprob | None, ...] = ()
        self._scores: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._ended: list[int] = []

    def add(self, chunk: TokensStreamed) -> None:
        """Print what can be printed."""
        if self._output.as_json:
            self._output.document(chunk)
            return
        index = chunk.index
        self._texts[index] += chunk.text
        self._scores[index] += chunk.logprobs
        self._prompt = self._prompt or chunk.prompt_logprobs
        if self._count == 1:
            self._output.text(chunk.text)
        elif chunk.finish_reason is not None:
            self._print_whole(index)

    def end(self) -> None:
        """Print what is left after the last chunk."""
        if self._count > 1:
            for index in range(self._count):
                if index not in self._ended:
                    self._print_whole(index)
            self._print_scores("prompt", self._prompt)
            return
        self._end_line(self._texts[0])
        self._print_scores("prompt", self._prompt)
        self._print_scores("output", self._scores[0])

    def _print_whole(self, index: int) -> None:
        self._ended.append(index)
        self._output.text(f"[{index}] {self._texts[index]}")
        self._end_line(self._texts[index] or "-")
        self._print_scores(f"output {index}", self._scores[index])

    def _end_line(self, text: str) -> None:
        if text and not text.endswith("\n"):
            self._output.text("\n")

    def _print_scores(
        self, name: str, scores: list[TokenLogprob] | tuple[TokenLogprob | None, ...]
    ) -> None:
        """Print a line per token: its id, log-probability, rank, and the most likely tokens."""
        for entry in scores:
            if entry is not None:
                best = "  ".join(f"{token} {logprob:.4f}" for token, logprob in entry.top)
                line = f"{name} {entry.token:>7} {entry.logprob:>10.4f} rank {entry.rank}"
                self._output.text(f"{line}  {best}".rstrip() + "\n")
