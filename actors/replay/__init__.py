"""The package `replay` of `zbmd.actors`."""
