"""The allocator's setting is taken where there is one."""

from __future__ import annotations

import platform

from quire.services.server.process import keep_freed_buffers


def test_glibc_takes_the_setting() -> None:
    assert keep_freed_buffers() is (platform.libc_ver()[0] == "glibc")
