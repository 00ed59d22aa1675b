"""Links between hosts over TCP, and the stripes beside them that carry bulk data.

`connect` listens and dials, `link` moves frames as protected records, `regions` joins a bulk connection to a
link. Imports `handshake`, `secure`, `bulk` and `host`. Begin with `connect`.
"""
