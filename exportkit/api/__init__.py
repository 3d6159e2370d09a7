"""The public classes and functions: thin layers over the rooms below."""
