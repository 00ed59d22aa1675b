"""The package `handshake` of `zbmd.transport`."""
