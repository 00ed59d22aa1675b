"""The handshake: hello, cookie and session setup, and the acceptor of half-open connections.

`hello` is the machine (sans-I/O), `driver` runs it and declares how captures record it, `session_setup` is
what two hosts agree on after it. Imports `secure`, `link.endpoint` and `capture`. Begin with `hello`.
"""
