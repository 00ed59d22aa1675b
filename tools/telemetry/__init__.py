"""The database of a run: one SQLite file of what its ranks measured and what happened.

`schema` has the tables, `tail` reads files that grow, `ingest` fills the database, `commands` asks it.
Imports `cli`, `runs` and the training layer. Begin with `ingest`; see docs/GUIDE_PROFILE.md.
"""
