"""Protection between hosts: session keys, MACs, the record stream and TLS.

Imports `identity`, `frames` and `errors` alone. Begin with `protection` and `record_stream`.
"""
