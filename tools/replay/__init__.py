"""The package `replay` of `zbmd.tools`."""
