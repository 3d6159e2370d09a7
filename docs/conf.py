"""Sphinx configuration: `make docs` builds the pages in docs/_build/html."""

import logging
import os
import sys
from importlib.metadata import version as installed_version

# Importing the theme turns on logging at level INFO; what the ONNX optimizer logs about each pass is left out.
logging.getLogger("onnx_ir").setLevel(logging.WARNING)

# The gallery examples run during the build and load nothing from the Hugging Face hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, os.path.dirname(__file__))  # for the modules beside this file

project = "exportkit"
author = "The exportkit authors"
copyright = "The exportkit authors"
release = installed_version("exportkit")
version = ".".join(release.split(".")[:2])

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "sphinx_gallery.gen_gallery",
    "conformance_table",
    "coverage_table",
]
exclude_patterns = ["_build"]

# A reference that leads nowhere is an error, but for types in signatures: of other packages, and of inner modules.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|os|pathlib|re|torch|typing)\..*"),
    ("py:.*", r"exportkit\.(?!errors)\w+\..*"),
    ("py:.*", r".*\[.*"),
    ("py:exc", r"\w+(Error|Failure)"),
    # imported for the type checker only, so that their module is not known
    ("py:class", r"Captured|Console|ObservedInfo|Path|Split"),
]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["gallery.css"]
html_title = f"exportkit {release}"

autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of dataclasses are listed once
autodoc_typehints_format = "short"

sphinx_gallery_conf = {
    "examples_dirs": "../gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "gallery_order.place",
    # The examples print text: there are no figures to collect, and matplotlib is not needed.
    "image_scrapers": (),
    "reset_modules": (),
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
}
