"""Records the weight versions of a request's sampled tokens (`TokenLabels`), as vLLM itself does not."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

Spans = list[tuple[int, str]]
"""(index of a token, name of the version that sampled the tokens from it on), in rising order."""


class TokenLabels:
    """Counts the tokens of every running request whenever the version changes; steps are paused then."""

    def __init__(self) -> None:
        self._version = ""
        self._spans: dict[Hashable, Spans] = {}

    @property
    def running(self) -> tuple[Hashable, ...]:
        """Requests between `begin` and `end`."""
        return tuple(self._spans)

    def begin(self, request_id: Hashable) -> None:
        """A request begins with the current version."""
        self._spans[request_id] = [(0, self._version)]

    def change(self, version: str, num_tokens: Mapping[Any, int], complete: Collection[Hashable] = ()) -> None:
        """Label tokens from here on with `version`; `num_tokens`: tokens of each running request so far (0 if
        missing). No step may be made between counting and this call. `complete` requests stay as they are: all
        their tokens are sampled, and only their `end` is to come."""
        self._version = version
        for request_id, spans in self._spans.items():
            if request_id in complete:
                continue
            count = num_tokens.get(request_id, 0)
            if spans[-1][0] == count:
                spans.pop()
            spans.append((count, version))

    def end(self, request_id: Hashable, num_tokens: int) -> Spans:
        """The spans of a request that ended with `num_tokens`; at least one."""
        spans = self._spans.pop(request_id)
        return [span for span in spans if span[0] < num_tokens] or spans[:1]
