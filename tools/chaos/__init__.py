"""The package `chaos` of `zbmd.tools`."""
