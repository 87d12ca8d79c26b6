"""Finds the name of a request's session: the conversation, or the run of an agent, that it is a turn of.

A name belongs to its tenant: the same name of another tenant is another session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.rpc.errors import InvalidArgument
from quire.services.router.tenants.api_keys import Headers

SESSION_HEADERS = (
    "x-session-id",
    "x-session-affinity",
    "session-id",
    "thread-id",
    "x-claude-code-session-id",
)
"""Headers that name a session, in order of precedence: opencode sends the first two, Codex the next two."""
AGENT_HEADER = "x-claude-code-agent-id"
"""Header of Claude Code's sub-agents, each of which has a conversation of its own in the same session."""
MAX_USER_ID_CHARS = 1024
"""Longest ``metadata.user_id`` that is read as JSON, on the event loop; Claude Code's is much shorter."""

_NAME = re.compile(r"[\x20-\x7e]{1,128}")


def session_name(headers: Headers, named: str) -> str:
    """Return the first valid name in the headers, or else the name in the request; empty if there is none.

    A name that is not of 1 to 128 printable ASCII characters counts as absent: no answer depends on a name.

    Args:
        named: ``session`` of the ``pb.Generation``.
    """
    sent: dict[str, object] = {name.lower(): value for name, value in headers}
    names = [sent.get(name) for name in SESSION_HEADERS]
    if names[-1] and AGENT_HEADER in sent:
        names[-1] = f"{names[-1]}/{sent[AGENT_HEADER]}"
    return _first_valid(*names, named)


def session_in_body(cache_key: object, metadata: object) -> str:
    """Return the first valid name in these fields of an HTTP body; empty if there is none."""
    fields = metadata if isinstance(metadata, Mapping) else {}
    return _first_valid(cache_key, fields.get("session_id"), _from_user_id(fields.get("user_id")))


def check_session_name(name: str) -> None:
    """Check a name that a request is about.

    Raises:
        InvalidArgument: it cannot be the name of a session.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument("session", "must have 1 to 128 printable ASCII characters")


def _first_valid(*names: object) -> str:
    return next((name for name in names if isinstance(name, str) and _NAME.fullmatch(name)), "")


def _from_user_id(text: object) -> object:
    """Return the session in the JSON text that Claude Code sends as the user's id."""
    if not isinstance(text, str) or len(text) > MAX_USER_ID_CHARS:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value.get("session_id") if isinstance(value, dict) else None
