"""Which tokens a request's format and rules allow next."""
