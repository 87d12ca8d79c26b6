"""A fake router for the clients."""

from __future__ import annotations

from tests.testing.fake_generation import fake_generation as fake_generation
