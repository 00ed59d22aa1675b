"""The package `native` of `zbmd.actors.core`."""
