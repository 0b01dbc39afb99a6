"""Response formats, one module each."""
