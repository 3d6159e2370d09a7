"""The public classes and functions: thin layers over the packages below."""
