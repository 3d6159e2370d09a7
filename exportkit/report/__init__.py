"""HTML pages that need no other files and no network, and the progress display. Nothing here imports torch."""
