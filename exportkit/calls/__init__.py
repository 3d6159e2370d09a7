"""Recorded calls: recording, storing, and saving them."""
