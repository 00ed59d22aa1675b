"""Devices of a model, and arrays on them."""
