"""Processes seen from outside: whether one stands still, and the process beside a trainer that ends it then."""
