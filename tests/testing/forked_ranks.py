"""Ranks that are forked as ``forked`` does it, for tests of what they compute."""

from __future__ import annotations

from quire.engine.ranks.settings import RankSettings
from tests.testing.forked import Forked

_RANK = """
import json, sys
from quire.engine.ranks.rank import main

settings = json.loads(sys.argv[1])
settings.update(zip(("memory", "pool", "control", "life"), [each.fileno() for each in inherited]))
sys.argv[1] = json.dumps(settings)
main()
"""


def forked_rank(settings: RankSettings) -> Forked:
    """Start the process of a rank other than 0, in place of ``quire.engine.ranks.ranks._start``."""
    descriptors = settings.memory, settings.pool, settings.control, settings.life
    return Forked(_RANK, [settings.to_json()], descriptors=descriptors)
