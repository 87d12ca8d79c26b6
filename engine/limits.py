"""What a request may ask of an engine; free of torch, for those who check requests where there is none."""

from __future__ import annotations

MAX_SEQUENCES = 64
"""Most sequences of one request."""

MAX_LOGIT_BIASES = 1024
"""Most tokens with a bias of one request."""

MAX_LOGPROBS = 20
"""Most of the likeliest tokens beside each token."""

MIN_BUDGET_BLOCKS = 3
"""Least blocks of a sequence with a budget: one being filled, the newest full one, one to choose."""
