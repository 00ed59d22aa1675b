"""The compiled part of recording: what runs at each message of a recorded actor."""
