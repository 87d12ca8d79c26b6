"""Which blocks a worker holds in any tier: a forest in which no block outlives its parent."""

from __future__ import annotations


class PrefixTree:
    """Blocks by hash, each after its parent.

    A block without its parent is reachable by no prompt, so it goes when the parent goes.
    """

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        # Dicts for sets, in order of insertion: the same events give the same order of removals.
        self._children: dict[bytes, dict[bytes, None]] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def hashes(self) -> set[bytes]:
        """All blocks."""
        return set(self._parents)

    def parent(self, block_hash: bytes) -> bytes | None:
        """Return a held block's parent; None if it is a prompt's first block."""
        return self._parents[block_hash]

    def add(self, block_hash: bytes, parent_hash: bytes | None) -> bool:
        """Add a block; return False if it is held already, or its parent is not."""
        if block_hash in self._parents or (parent_hash is not None and parent_hash not in self._parents):
            return False
        self._parents[block_hash] = parent_hash
        if parent_hash is not None:
            self._children.setdefault(parent_hash, {})[block_hash] = None
        return True

    def remove(self, block_hash: bytes) -> list[bytes]:
        """Remove a block and all that follow it; return them, children before parents."""
        removed = [block_hash]
        for each in removed:
            removed += self._children.pop(each, ())
        parent_hash = self._parents[block_hash]
        if parent_hash is not None:
            siblings = self._children[parent_hash]
            del siblings[block_hash]
            if not siblings:
                del self._children[parent_hash]
        for each in removed:
            del self._parents[each]
        return removed[::-1]
