"""The commands of ``exportkit``: each takes options, calls the stages, and prints what came of it.

Results go to stdout, progress and errors to stderr. The exit code is 0 if all is well, 1 if a result is not proven, and
2 for wrong use.
"""
