"""The saved form of an export: graphs, manifest, recorded calls, and files for other runtimes."""
