"""The package `hangs` of `zbmd.actors`."""
