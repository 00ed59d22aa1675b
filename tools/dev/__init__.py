"""The package `dev` of `zbmd.tools`."""
