"""Records every module call of a run and compares two such traces."""
