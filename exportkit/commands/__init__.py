"""The commands of ``exportkit``: they parse options, call the public functions, and print the result.

Results go to stdout, progress and errors to stderr. The exit code is 0 for success, 1 if a result is not proven, and 2
for invalid usage.
"""
