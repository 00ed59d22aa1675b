"""The package `host` of `zbmd.actors`."""
