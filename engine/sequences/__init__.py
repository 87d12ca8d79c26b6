"""One sequence: its tokens, its block table, and how its next token is chosen."""
