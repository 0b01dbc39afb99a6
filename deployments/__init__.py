"""The Ray Serve replicas: one file a pool."""
