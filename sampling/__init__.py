"""The parameters of a request: their names, defaults and ranges, and their fields in the messages."""
