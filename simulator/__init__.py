"""A discrete-event simulation of a cluster, which places requests with the router's own code."""
