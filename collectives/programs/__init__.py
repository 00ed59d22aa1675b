"""Programs: one rank's part of a collective as data, its specification, and the verifier.

`program` defines, prints and parses instructions; `spec` says what the programs of all ranks must achieve;
`verifier` proves that they do; `layout` places blocks of different lengths. Imports `zbmd.collectives.errors`
and the native constants alone. Begin with `program`, then `verifier`.
"""
