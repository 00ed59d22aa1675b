"""The package `supervision` of `zbmd.actors`."""
