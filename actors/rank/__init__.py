"""The package `rank` of `zbmd.actors`."""
