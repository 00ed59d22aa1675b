"""The package `directory` of `zbmd.actors`."""
