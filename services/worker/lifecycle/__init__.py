"""From the settings to a worker that serves, and from there to its end."""
