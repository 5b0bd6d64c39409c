"""Outputs on their way to whoever waits for them.

Several callers can drive one engine (`step`, `generate`, `stream`, from several threads): whoever runs an iteration
produces outputs of everybody's requests. Outputs are cumulative, so only the newest of each is kept.
"""

from __future__ import annotations

from neo_compile.runtime.outputs import RequestOutput


class Outbox:
    """Newest outputs by request; requests can be claimed, the rest belongs to `Engine.step`."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], RequestOutput] = {}
        self._claimed: set[str] = set()

    def claim(self, request_id: str) -> None:
        """Outputs of this request are only handed to `take(request_id)`."""
        self._claimed.add(request_id)

    def release(self, request_id: str) -> None:
        """Give up a claim and drop what nobody took."""
        self._claimed.discard(request_id)
        for key in [key for key in self._outputs if key[0] == request_id]:
            del self._outputs[key]

    def put(self, output: RequestOutput) -> None:
        """Add an output in place of an older one of the same request and index."""
        self._outputs[output.request_id, output.index] = output

    def take(self, request_id: str) -> list[RequestOutput]:
        """Remove and return the outputs of a claimed request."""
        keys = [key for key in self._outputs if key[0] == request_id]
        return [self._outputs.pop(key) for key in keys]

    def take_unclaimed(self) -> list[RequestOutput]:
        """Remove and return the outputs of all requests that nobody claimed."""
        keys = [key for key in self._outputs if key[0] not in self._claimed]
        return [self._outputs.pop(key) for key in keys]

    @property
    def has_unclaimed(self) -> bool:
        """Whether `take_unclaimed` would return anything."""
        return any(request_id not in self._claimed for request_id, _ in self._outputs)
