"""Links between hosts over TCP, and the stripes beside them that carry bulk data.

`connect` listens, dials and joins a bulk connection to a link; `link` moves frames as protected records.
Imports `handshake`, `secure`, `bulk` and `host`. Begin with `connect`.
"""
