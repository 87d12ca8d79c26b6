"""Serves the page at the root of the HTTP port. It needs no key; the routes from which it loads data do."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import PurePath

from aiohttp import web

PAGE_FILES = {
    "/": "index.html",
    **{f"/page/{name}": name for name in ("page.css", "api.js", "chat.js", "cluster.js", "icon.svg")},
}
"""The files by their paths."""
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # After an update, a browser must not mix old files with new ones.
    "Cache-Control": "no-cache",
}


async def page_file(request: web.Request) -> web.Response:
    """Return a file of the page."""
    name = PAGE_FILES[request.path]
    return web.Response(text=_read(name), content_type=_TYPES[PurePath(name).suffix], headers=_HEADERS)


@cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
