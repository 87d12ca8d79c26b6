"""Cuts the text before a cursor into pieces and counts their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.tokenization.answers.cursor import Cursor, EndedError, without_marks
from quire.tokenization.answers.pieces import Kind, Piece
from quire.tokenization.stop_strings import StopMatcher


class PieceWriter:
    """Cuts the text before a cursor off, and collects it as pieces.

    The shown text of one kind is that of all its regions, joined, without the whitespace between delimiters
    and the first or last text. Whitespace is therefore returned only when text of the same kind follows.
    """

    def __init__(
        self, cursor: Cursor, stop_strings: Sequence[str], min_tokens: int, max_calls: int | None
    ) -> None:
        self.kind = Kind.CONTENT
        self.stop: str | None = None
        self.has_delimiter = False
        """Whether a delimiter was written, or precedes the answer."""
        self.begun: set[Kind] = set()
        """The kinds that have text, shown or held back."""
        self._cursor = cursor
        self._stop_strings = stop_strings
        self._matcher = StopMatcher(stop_strings)
        self._num_unmatched_tokens = min_tokens
        self._unmatched_end = 0
        """Offset in the answer up to which stop strings do not count."""
        self._max_calls = max_calls
        self._num_calls = 0
        self._region_has_text = False
        self._space = dict.fromkeys(Kind, "")
        """For each kind, the whitespace after its shown text, with that of the current region."""
        self._space_before = dict(self._space)
        self.start = 0
        """Offset in the answer of the cursor's text."""
        self._token_ends: deque[int] = deque()
        """Offsets in the answer where the tokens that are not in a piece yet end."""
        self._pieces: list[Piece] = []
        self._last: Piece | None = None
        """The last piece; tokens without text count to its kind."""

    def add_token(self, text: str) -> None:
        """Append the text of one token to the cursor's text.

        A token without text counts to the text before it, also if text of another part arrives with it.
        """
        self._cursor.text += text
        end = self.start + len(self._cursor.text)
        self._token_ends.append(end)
        if self._num_unmatched_tokens:
            self._num_unmatched_tokens -= 1
            self._unmatched_end = end
        if not self._cursor.text:
            last = self._last or Piece(self.kind, "")
            self._add(Piece(last.kind, "", self._cut()[1], last.call_index))

    @property
    def continues(self) -> bool:
        """Whether the last piece is of the current kind, which has text: further text only continues it."""
        return self._last is not None and self._last.kind is self.kind and self.kind in self.begun

    def write_whole(self, text: str, num_tokens: int) -> Piece:
        """Return the piece of some tokens whose text continues the last piece; there are no stop strings."""
        self.start += len(text)
        return Piece(self.kind, self._shown(text), num_tokens)

    def write_text(self) -> None:
        """Show the text before the cursor as the current kind.

        Raises:
            EndedError: a stop string ended the answer; ``stop`` is that string.
        """
        num_unmatched = max(0, self._unmatched_end - self.start)
        text, num_tokens = self._cut()
        if self.kind is not Kind.CONTENT or not self._stop_strings:
            self._show(self._trimmed(text), num_tokens)
            return
        self._show(self._trimmed(text[:num_unmatched]), num_tokens)
        fed = self._matcher.feed(self._trimmed(text[num_unmatched:]))
        self._show(fed.text)
        if fed.is_stopped:
            self.stop = fed.stop
            raise EndedError

    def write_delimiter(self, kind: Kind) -> None:
        """Count the text before the cursor to a kind, and show none of it."""
        self._end_region()
        self._add(Piece(kind, "", self._cut()[1], self._call_index if kind is Kind.CALL else 0))

    def write_call(self, arguments: str, name: str = "", call_id: str = "") -> None:
        """Return the next part of a call's arguments, which covers the text before the cursor.

        Content follows a call.
        """
        self._end_region()
        self.kind = Kind.CONTENT
        if name:
            self._num_calls += 1
        if self._max_calls is not None and self._num_calls > self._max_calls:
            self.write_delimiter(Kind.CALL)
        else:
            self._add(Piece(Kind.CALL, arguments, self._cut()[1], self._call_index, name, call_id))

    def finish(self) -> None:
        """Return what is held back, and count all tokens."""
        self._cursor.at = len(self._cursor.text)
        self._add(Piece(self.kind, "", self._cut()[1]))
        if self.stop is None:
            self._show(self._matcher.flush())
        if self._region_has_text or not self.has_delimiter:
            self._add(Piece(self.kind, self._space[self.kind]))

    def take(self) -> list[Piece]:
        """Return the pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _end_region(self) -> None:
        if self._stop_strings:
            self._show(self._matcher.flush())
            self._matcher = StopMatcher(self._stop_strings)
        self.has_delimiter = True
        if self._region_has_text:
            self._space_before[self.kind] = self._space[self.kind]
        else:
            # Whitespace that only separates delimiters is no text.
            self._space[self.kind] = self._space_before[self.kind]
        self._region_has_text = False

    def _trimmed(self, text: str) -> str:
        text = without_marks(text)
        if self.has_delimiter and self.kind not in self.begun:
            text = text.lstrip()
        if text.strip():
            self.begun.add(self.kind)
        return text

    def _show(self, text: str, num_tokens: int = 0) -> None:
        self._add(Piece(self.kind, self._shown(text), num_tokens))

    def _shown(self, text: str) -> str:
        """Return the text without the whitespace at its end, which is held back."""
        whole = self._space[self.kind] + text
        shown = whole.rstrip()
        self._space[self.kind] = whole[len(shown) :]
        if shown:
            self._region_has_text = True
        return shown

    @property
    def _call_index(self) -> int:
        """Number of the last call, counted from 0; before the first call, that of the first."""
        num_calls = self._num_calls if self._max_calls is None else min(self._num_calls, self._max_calls)
        return max(0, num_calls - 1)

    def _cut(self) -> tuple[str, int]:
        """Remove and return the text before the cursor, and the number of tokens that end in it."""
        cursor = self._cursor
        text, cursor.text = cursor.text[: cursor.at], cursor.text[cursor.at :]
        self.start += cursor.at
        cursor.at = 0
        num_tokens = 0
        while self._token_ends and self._token_ends[0] <= self.start:
            self._token_ends.popleft()
            num_tokens += 1
        return text, num_tokens

    def _add(self, piece: Piece) -> None:
        if not (piece.text or piece.num_tokens or piece.name):
            return
        last = self._pieces[-1] if self._pieces else None
        self._last = piece
        if last and not piece.name and (last.kind, last.call_index) == (piece.kind, piece.call_index):
            text, num_tokens = last.text + piece.text, last.num_tokens + piece.num_tokens
            self._pieces[-1] = last._replace(text=text, num_tokens=num_tokens)
        else:
            self._pieces.append(piece)
