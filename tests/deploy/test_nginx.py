"""The configuration of nginx is one that nginx takes, and its limits fit the router's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from quire.rpc.server import PUBLIC_MESSAGE_BYTES
from tests.soak.fuzz.proxy import behind_nginx
from tests.testing.commands import run_command

CONFIGURATION = Path(__file__).parents[2] / "deploy/nginx/nginx.conf"


needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@needs_nginx
def test_nginx_accepts_the_configuration(tmp_path: Path) -> None:
    run_command("nginx", "-t", "-p", tmp_path, "-c", CONFIGURATION)


def test_nginx_passes_the_largest_message_and_the_longest_request() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    [mebibytes] = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(mebibytes) << 20 > PUBLIC_MESSAGE_BYTES
    seconds = re.findall(r"(?:grpc|proxy)_read_timeout (\d+)s;", text)
    assert [int(each) > 600 for each in seconds] == [True, True]


@needs_nginx
@pytest.mark.parametrize(("num_bytes", "status"), [(18 << 20, 413), (10, 503)])
def test_nginx_answers_with_errors_that_clients_can_read(
    num_bytes: int, status: int, unused_tcp_port: int
) -> None:
    nobody = f"127.0.0.1:{unused_tcp_port}"
    with behind_nginx(nobody, nobody) as (_, address):
        request = Request(f"http://{address}/v1/completions", bytes(num_bytes))
        with pytest.raises(HTTPError) as caught, urlopen(request, timeout=30):
            pass
    assert caught.value.code == status
    assert json.load(caught.value)["error"]["message"]
