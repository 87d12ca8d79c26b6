"""The workers that a router knows: their health, their connections and their outputs."""
