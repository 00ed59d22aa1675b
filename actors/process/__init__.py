"""Processes of a host: the template that forks them, the reaper that ends leftovers, output, exit reasons.

Used by hosts for ranks and by supervision for pools of worker processes; nothing here knows a job or an
actor. Imports the transport layer and `actors.view` only; reaper and template import next to nothing, to
start fast and to survive whatever their children do. Begin with `template` (what is forked, and how it
is asked for), then `template_client` (the host's side) and `early_template` (with the reaper).
"""
