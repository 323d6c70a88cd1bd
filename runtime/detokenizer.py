"""The text of an answer while it grows: whole characters only, and nothing of what may still become a stop string.

Both parts read the text as one stream of characters, so where tokens and blocks begin and end does not matter.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.runtime.tokenizer import Tokenizer


class Detokenizer:
    """Token ids to text, one token at a time. The pieces joined, `flush` included, equal the decoding of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        """What is left at the end: empty, or U+FFFD for a character that was cut."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the first stop string in a stream of characters: the one that ends first, and of those the longest."""

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that can go out now, and the stop string if `text` completes one.

        With a match the text ends where the answer ends. Without `armed` a string completed here does not count.
        """
        known = len(self._held)
        text = self._held + text
        self._held = ""
        if armed and (found := self._find(text, known)):
            start, string = found
            return text[: start + len(string) if self._include else start], string
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, known: int) -> tuple[int, str] | None:
        """The first string that ends behind the first `known` characters: one that ended among them was unarmed."""
        starts = ((text.find(string, max(0, known + 1 - len(string))), string) for string in self._strings)
        matches = [(start, string) for start, string in starts if start >= 0]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(string) for string in self._strings), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(string) > length and string.startswith(tail) for string in self._strings):
                return length
        return 0


@dataclass(frozen=True)
class Piece:
    """What a block adds to an answer: the text that can go out, how many of the block's tokens belong to the answer,
    and the stop string that ended it."""

    text: str
    kept: int
    stop: str | None = None


class AnswerText:
    """The text of one request, fed with blocks of token ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stop_strings, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token_ids: Sequence[int], ends_with_stop_token: bool = False) -> Piece:
        """Takes a block in. `ends_with_stop_token` says that its last id is end of text or a stop token, whose own text
        belongs to the answer only if stops are included."""
        text = ""
        for place, token_id in enumerate(token_ids, 1):
            self._tokens += 1
            silent = ends_with_stop_token and place == len(token_ids) and not self._include_stop
            characters = "" if silent else self._detokenizer.push(token_id)
            released, stop = self._matcher.push(characters, armed=self._tokens >= self._min_tokens)
            text += released
            if stop is not None:
                return Piece(text, place, stop)
        return Piece(text, len(token_ids))

    def flush(self) -> str:
        """The rest of the text, when the answer ends without a stop string."""
        return self._matcher.flush() + self._detokenizer.flush()
