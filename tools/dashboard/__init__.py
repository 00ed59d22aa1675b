"""A page on a run: where its time went, its losses and recoveries, live or afterwards.

`queries` asks the database of the run, `server` gives the answers to a browser, `assets` has the pages.
Imports `cli`, `runs` and `telemetry`. Begin with `queries`; see docs/GUIDE_DASHBOARD.md.
"""
