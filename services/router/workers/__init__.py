"""The workers that a router knows: their health, their connections and what they send."""
