"""Which version made which token, where vLLM itself does not say: counted while the engine stands still."""

from __future__ import annotations

from collections.abc import Mapping

Spans = list[tuple[int, str]]
"""(first token, name of the version that made it and those after it), in rising order."""


class TokenLabels:
    """Notes how many tokens every running request has whenever the version changes."""

    def __init__(self) -> None:
        self._version = ""
        self._spans: dict[str, Spans] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """Requests between `begin` and `end`."""
        return tuple(self._spans)

    def begin(self, request_id: str) -> None:
        """A request comes; its tokens are made by the version of now."""
        self._spans[request_id] = [(0, self._version)]

    def change(self, version: str, num_tokens: Mapping[str, int]) -> None:
        """From now on tokens are made by `version`; `num_tokens` of each running request were made before, none where
        it says nothing. Nothing may be generated between the counting and this call."""
        self._version = version
        for request_id, spans in self._spans.items():
            count = num_tokens.get(request_id, 0)
            if spans[-1][0] == count:
                spans.pop()
            spans.append((count, version))

    def end(self, request_id: str, num_tokens: int) -> Spans:
        """The spans of a request that has ended with so many tokens; one at least."""
        spans = self._spans.pop(request_id)
        return [span for span in spans if span[0] < num_tokens] or spans[:1]
