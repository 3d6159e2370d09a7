"""Pages for people: one HTML file each, that needs no other file and no network.

In come plain values of the stages, or what a folder says of them; out comes a page. Nothing here imports torch.
"""

from exportkit.report.render import render, write_page

__all__ = ["render", "write_page"]
