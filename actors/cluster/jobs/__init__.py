"""The package `jobs` of `zbmd.actors.cluster`."""
