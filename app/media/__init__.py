"""Bytes -> uint8 frames, exactly as the reference processors have them before normalisation."""
