"""Typed settings: the one schema of the application's `args:` in a Serve config file."""
