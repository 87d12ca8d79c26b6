"""What operators ask of a router: drains, roles, scaling."""
