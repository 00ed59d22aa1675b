"""The package `doctor` of `zbmd.tools`."""
