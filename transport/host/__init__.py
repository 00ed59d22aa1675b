"""Facts of this host, and choices that follow from them.

`topology` reads processors, devices and interfaces; `link_choice` decides how two hosts are linked, as pure
functions. Imports `errors` alone. Begin with `topology`.
"""
