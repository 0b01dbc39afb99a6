"""Frames in, embeddings out: what a replica holds. Upload, replay and copy-out of successive batches overlap."""
