"""Text of a growing list of tokens, a few tokens at a time, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Appends tokens, keeps the text.

    A token's text can depend on the token before it (a leading space, bytes of one character): new text is the
    difference between decoding a short tail with and without the new tokens, and is held back while it ends in the
    middle of a character.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._tail_start = 0  # tokens before it are settled and no longer decoded
        self._tail_end = 0  # tokens before it are in `text`
        self.text = ""

    def append(self, token_id: int) -> bool:
        """Add one token; True if a stop string was completed, which then is cut off together with what follows it."""
        self._token_ids.append(token_id)
        new_text = self._new_text()
        if not new_text:
            return False
        searched_from = len(self.text) - max((len(s) for s in self._stop), default=0)
        self.text += new_text
        return self._cut_at_stop(max(0, searched_from))

    def finish(self) -> None:
        """Add what was held back as an unfinished character."""
        if self._tail_end < len(self._token_ids):
            self.text += self._decode(self._tail_start, None)[len(self._decode(self._tail_start, self._tail_end)) :]
            self._tail_end = len(self._token_ids)

    def _new_text(self) -> str:
        known = self._decode(self._tail_start, self._tail_end)
        whole = self._decode(self._tail_start, None)
        if len(whole) <= len(known) or whole.endswith("\ufffd"):
            return ""
        self._tail_start, self._tail_end = self._tail_end, len(self._token_ids)
        return whole[len(known) :]

    def _cut_at_stop(self, start: int) -> bool:
        found = [position for position in (self.text.find(s, start) for s in self._stop) if position >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _decode(self, start: int, end: int | None) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True)
