"""Turns generated tokens into text and into the parts of an answer: reasoning, content, tool calls."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import groupby

from quire.protos import inference_pb2 as pb
from quire.services.requests.validation import ValidRequest
from quire.tokenization.answers.parser import AnswerParser
from quire.tokenization.answers.pieces import Kind, Piece
from quire.tokenization.stop_strings import Fed
from quire.tokenization.tokenizer import IncrementalDecoder, Tokenizer


class DividingDecoder:
    """Turns the tokens of one answer into their whole text, with special tokens and a stop string at its end.

    Text and pieces depend on the tokens alone, not on how many arrive at once.
    """

    def __init__(self, tokenizer: Tokenizer, request: ValidRequest, parser: AnswerParser, index: int) -> None:
        self.num_reasoning_tokens = 0
        self.has_calls = False
        self._tokenizer = tokenizer
        self._request = request
        self._has_stops = bool(request.response.stop_strings)
        self._index = index
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        self._parser = parser
        self._pieces: list[Piece] = []

    def feed(self, token_ids: Sequence[int]) -> tuple[Fed, int]:
        """Take the next tokens, up to the one that completes a stop string, as ``StoppingDecoder`` does."""
        whole, parser = self._decoder.feed(token_ids), self._parser
        is_ordinary = self._tokenizer.are_ordinary(token_ids)
        if token_ids and not self._has_stops and is_ordinary:
            piece = parser.feed_text(whole, len(token_ids))
            if piece is not None:
                self._pieces.append(piece)
                return Fed(whole), len(token_ids)
        texts = self._decoder.divide(token_ids, whole)
        tokens = list(zip(texts, map(self._tokenizer.is_special, token_ids), strict=True))
        if not self._has_stops:
            self._pieces += parser.feed_all(tokens) if is_ordinary else self._fed(tokens)
            return Fed(whole), len(token_ids)
        for num_taken, (text, is_special) in enumerate(tokens, start=1):
            self._pieces += parser.feed(text, is_special=is_special)
            if parser.stop is not None:
                self._keep_stop(parser.stop)
                return Fed("".join(texts[:num_taken]), parser.stop), num_taken
        return Fed("".join(texts)), len(token_ids)

    def _fed(self, tokens: Sequence[tuple[str, bool]]) -> list[Piece]:
        """Return the pieces of tokens of which some may be special."""
        shown = "".join(text for text, is_special in tokens if not is_special)
        hidden = "".join(text for text, is_special in tokens if is_special)
        piece = self._parser.feed_text(shown, len(tokens), hidden)
        return self._parser.feed_all(tokens) if piece is None else [piece]

    def _keep_stop(self, stop: str) -> None:
        """Append the stop string that ended the content, if the client wants to have it."""
        if self._request.response.keep_stop_string:
            self._pieces.append(Piece(Kind.CONTENT, stop))

    def flush(self) -> Fed:
        """Return the text of an incomplete character, at the end of the tokens."""
        text = self._decoder.flush()
        self._pieces += self._parser.finish()
        if self._parser.stop is not None:
            self._keep_stop(self._parser.stop)
        elif self._pieces and self._pieces[-1].kind is not Kind.CALL:
            self._pieces.append(Piece(self._pieces[-1].kind, text))
        return Fed(text, self._parser.stop)

    def move_pieces(self, response: pb.GenerateStreamResponse) -> None:
        """Move the pieces of the tokens since the last call into a message."""
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._move(piece, response)
        if len(pieces) > 1:
            join_pieces(response)

    def _move(self, piece: Piece, response: pb.GenerateStreamResponse) -> None:
        if piece.kind is Kind.CONTENT:
            response.pieces.add(content=piece.text, num_tokens=piece.num_tokens)
        elif piece.kind is Kind.REASONING:
            self.num_reasoning_tokens += piece.num_tokens
            response.pieces.add(reasoning=piece.text, num_tokens=piece.num_tokens)
        else:
            call = pb.ToolCall(index=piece.call_index, name=piece.name, arguments=piece.text)
            if piece.name:
                self.has_calls = True
                call.id = piece.call_id or self._call_id(piece.call_index)
            response.pieces.add(tool_call=call, num_tokens=piece.num_tokens)

    def _call_id(self, call_index: int) -> str:
        """Return the id of a call: the same on another router that continues the answer."""
        seed, prompt = self._request.params.seed, self._request.prompt_token_ids
        numbers = array("Q", (seed, self._index, call_index, *prompt))
        return f"call_{blake2b(numbers.tobytes(), digest_size=12).hexdigest()}"


def join_pieces(response: pb.GenerateStreamResponse) -> None:
    """Join the pieces of a message that follow each other in the same part."""
    whole = joined(response.pieces)
    del response.pieces[:]
    response.pieces.extend(whole)


def joined(pieces: Iterable[pb.Piece]) -> list[pb.Piece]:
    """Return the pieces with those joined that follow each other in the same part."""
    return [_one(kind, list(run)) for (kind, _), run in groupby(pieces, _part)]


def _part(piece: pb.Piece) -> tuple[str | None, int]:
    return piece.WhichOneof("piece"), piece.tool_call.index


def _one(kind: str | None, run: list[pb.Piece]) -> pb.Piece:
    whole = pb.Piece()
    for piece in run:
        # A call's id and name are in one of its pieces, and remain.
        whole.MergeFrom(piece)
    whole.num_tokens = sum(piece.num_tokens for piece in run)
    if kind == "tool_call":
        whole.tool_call.arguments = "".join(piece.tool_call.arguments for piece in run)
    elif kind is not None:
        setattr(whole, kind, "".join(getattr(piece, kind) for piece in run))
    return whole
