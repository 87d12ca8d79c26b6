"""The blocks that a worker has in any tier, as a forest. When a block is removed, so are its children."""

from __future__ import annotations

from collections.abc import Collection


class PrefixTree:
    """Hashes of blocks, each with its parent.

    No prompt can find a block without its parent, so removing a block also removes its descendants::

        a ─┬─ ab ─── abc        remove_subtree(ab) == [abc, ab]
           └─ ad                add_block(xy, parent x) is False
    """

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        # Dicts serve as ordered sets, so that the same events give the same order of removals.
        self._children: dict[bytes, dict[bytes, None]] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def hashes(self) -> set[bytes]:
        """Hashes of all blocks in the tree."""
        return set(self._parents)

    def parent(self, block_hash: bytes) -> bytes | None:
        """Return the parent's hash of a block in the tree; None if it is a prompt's first block."""
        return self._parents[block_hash]

    def children(self, block_hash: bytes) -> Collection[bytes]:
        """Return the hashes of the blocks that follow a block."""
        return self._children.get(block_hash, ())

    def add_block(self, block_hash: bytes, parent_hash: bytes | None) -> bool:
        """Add a block; return False if the tree already has it, or lacks its parent."""
        if block_hash in self._parents or (parent_hash is not None and parent_hash not in self._parents):
            return False
        self._parents[block_hash] = parent_hash
        if parent_hash is not None:
            self._children.setdefault(parent_hash, {})[block_hash] = None
        return True

    def remove_subtree(self, block_hash: bytes) -> list[bytes]:
        """Remove a block and all its descendants; return their hashes, children before parents."""
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
