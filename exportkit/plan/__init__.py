"""What varies between calls: sizes as integer expressions over variables. Imports no torch."""
