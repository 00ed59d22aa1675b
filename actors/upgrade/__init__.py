"""The package `upgrade` of `zbmd.actors`."""
