"""Outputs on their way to whoever waits for them.

Several callers can drive one engine (`step`, `generate`, `stream`, from several threads): whoever runs an iteration
produces outputs of everybody's requests. Outputs are cumulative, so only the newest of each is kept.
"""

from __future__ import annotations

from neo_compile.runtime.outputs import RequestOutput


class Outbox:
    """Newest outputs by request; requests can be claimed, the rest belongs to `Engine.step`."""

    def __init__(self) -> None:
        self._outputs: dict[str, dict[int, RequestOutput]] = {}
        self._claimed: set[str] = set()

    def knows(self, request_id: str) -> bool:
        """Whether this request is claimed or has an output that nobody took: its id is not free."""
        return request_id in self._claimed or request_id in self._outputs

    def claim(self, request_id: str) -> None:
        """Outputs of this request are only handed to `take(request_id)`."""
        self._claimed.add(request_id)

    def release(self, request_id: str) -> None:
        """Give up a claim and drop what nobody took."""
        self._claimed.discard(request_id)
        self.take(request_id)

    def put(self, output: RequestOutput) -> None:
        """Add an output in place of an older one of the same request and index."""
        self._outputs.setdefault(output.request_id, {})[output.index] = output

    def take(self, request_id: str) -> list[RequestOutput]:
        """Remove and return the outputs of a claimed request."""
        return list(self._outputs.pop(request_id, {}).values())

    def take_unclaimed(self) -> list[RequestOutput]:
        """Remove and return the outputs of all requests that nobody claimed."""
        unclaimed = [request_id for request_id in self._outputs if request_id not in self._claimed]
        return [output for request_id in unclaimed for output in self.take(request_id)]

    @property
    def has_unclaimed(self) -> bool:
        """Whether `take_unclaimed` would return anything."""
        return not self._outputs.keys() <= self._claimed
