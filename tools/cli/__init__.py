"""The package `cli` of `zbmd.tools`."""
