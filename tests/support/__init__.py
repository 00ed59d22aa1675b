"""Parts that several test modules share: harnesses, worlds and processes; imported as `support.<package>`."""
