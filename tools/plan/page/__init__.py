"""`zbmd plan serve`: both planners as a page, whose curves the same Python functions compute over HTTP.

`designs` computes an answer and a saved design; `server` serves it with `page.html`, which needs no network.
May import what `zbmd.tools.plan` may. Begin with `designs`.
"""
