"""A discrete-event model of a cluster that places requests with the router's own code."""
