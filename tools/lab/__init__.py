"""The package `lab` of `zbmd.tools`."""
