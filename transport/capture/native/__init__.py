"""The package `native` of `zbmd.transport.capture`."""
