"""Links on one host: two rings in a memfd, file descriptors over a unix socket.

`connect` listens and dials, `attach` is what the sides exchange, `link` moves frames, `death_notice` reports
a peer's death within a millisecond. Imports `link`, `handshake` and `memory`. Begin with `connect`.
"""
