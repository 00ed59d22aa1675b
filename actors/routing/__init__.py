"""The package `routing` of `zbmd.actors`."""
