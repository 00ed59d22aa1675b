"""The package `sim` of `zbmd.tools`."""
