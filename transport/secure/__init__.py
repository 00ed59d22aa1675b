"""The package `secure` of `zbmd.transport`."""
