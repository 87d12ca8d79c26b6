"""A process with a pool that others read by NIXL: ``python -m tests.kvtransfer.nixl.holder EPOCH``.

It prints its offer as hexadecimal digits, and ends when its input ends.
"""

from __future__ import annotations

import sys

import numpy as np

from quire.kvtransfer.transports.nixl import NixlAgent

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 32


def content() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return the pool's blocks, of which no two are alike."""
    return np.random.default_rng(5).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


def main() -> None:
    pool = content()
    agent = NixlAgent(sys.argv[1])
    print(agent.offer(pool.ctypes.data, pool.nbytes).SerializeToString().hex(), flush=True)
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main()
