"""What every HTTP API needs: bodies, connections, errors, streams."""
