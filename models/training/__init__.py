"""Trains the demo model: ``python -m quire.models.training.train --out models/demo``."""
