"""The package `node` of `zbmd.tools`."""
