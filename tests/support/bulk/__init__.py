"""A pair of hosts that move bulk data."""
