"""Runs nginx, with the configuration in ``deploy/nginx``, in front of a stack."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIGURATION = Path(__file__).resolve().parents[3] / "deploy/nginx/nginx.conf"
START_SECONDS = 10.0


@contextmanager
def behind_nginx(grpc: str, http: str) -> Iterator[tuple[str, str]]:
    """Run nginx in front of two ports of a router, and return the addresses of nginx for them.

    Raises:
        FileNotFoundError: nginx is not installed.
        TimeoutError: nginx does not listen in time.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as first, socket.socket() as second:
        # If root starts nginx, its worker is another user, and must reach its own folders for large bodies.
        Path(folder).chmod(0o711)
        ports = []
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
            ports.append(each.getsockname()[1])
            each.close()
        text = CONFIGURATION.read_text(encoding="utf-8")
        for old, new in {
            "127.0.0.1:8500": grpc,
            "127.0.0.1:8502": http,
            "listen 8600": f"listen 127.0.0.1:{ports[0]}",
            "listen 8602": f"listen 127.0.0.1:{ports[1]}",
        }.items():
            text = text.replace(old, new)
        Path(folder, "nginx.conf").write_text(text, encoding="utf-8")
        nginx = subprocess.Popen(["nginx", "-p", folder, "-c", "nginx.conf", "-g", "daemon off;"])
        try:
            for port in ports:
                _wait_for(port)
            yield (f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")
        finally:
            nginx.terminate()
            nginx.wait()


def _wait_for(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise TimeoutError("nginx does not listen; its messages above say why") from None
            time.sleep(0.05)
