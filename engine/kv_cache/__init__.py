"""The memory of KV blocks and its ledger: pool, pins, swap space and lower tiers. It knows no sequences."""
