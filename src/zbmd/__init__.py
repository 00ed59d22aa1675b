"""zbmd: an asyncio message-passing protocol stack for training jobs that must not die."""

__version__ = "0.1.0"
