"""The package `core` of `zbmd.actors`."""
