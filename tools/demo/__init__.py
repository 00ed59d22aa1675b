"""The package `demo` of `zbmd.tools`."""
