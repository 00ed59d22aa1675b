"""Commands on the files of a finished run: its ledger, plot, profile, flight records and generated text.

May import `cli` and the training layer. Start reading at `commands.py`.
"""
