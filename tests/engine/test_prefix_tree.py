"""The forest of blocks against a set of paths: a block is never there without its parent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.prefix_tree import PrefixTree

words = st.text("ab", min_size=1, max_size=4)
events = st.lists(st.tuples(st.booleans(), words), max_size=40)


def parent(word: str) -> str | None:
    return word[:-1] or None


def encode(word: str | None) -> bytes | None:
    return None if word is None else word.encode()


@given(events)
def test_a_block_is_there_with_all_its_ancestors_or_not_at_all(events: list[tuple[bool, str]]) -> None:
    """Blocks are words, and the parent of a word is the word without its last letter."""
    tree, held = PrefixTree(), set[str]()
    for is_added, word in events:
        if is_added:
            fits = word not in held and (parent(word) is None or parent(word) in held)
            assert tree.add_block(word.encode(), encode(parent(word))) == fits
            held |= {word} if fits else set()
        elif word in held:
            removed = [each.decode() for each in tree.remove_subtree(word.encode())]
            assert sorted(removed) == sorted(each for each in held if each.startswith(word))
            assert all(parent(each) not in removed[:place] for place, each in enumerate(removed))
            held -= set(removed)
        assert tree.hashes == {each.encode() for each in held}
        assert len(tree) == len(held)
        assert (word.encode() in tree) == (word in held)
    assert all(tree.parent(each.encode()) == encode(parent(each)) for each in held)


def test_equal_events_give_an_equal_order_of_removals() -> None:
    def removals() -> list[bytes]:
        tree = PrefixTree()
        tree.add_block(b"root", None)
        for number in range(50):
            tree.add_block(b"%d" % number, b"root")
        return tree.remove_subtree(b"root")

    assert removals() == removals() == [b"%d" % number for number in reversed(range(50))] + [b"root"]
