"""Exhaustive checks of what the tests only sample: programs of collectives, states of the membership."""
