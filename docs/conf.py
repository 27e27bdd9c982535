"""The site: `make docs` builds it, and fails at a warning.

It imports ingot from `python/`, with the extension module built there. Empty modules replace
frameworks other than numpy and torch.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "python")]

project = "ingot"
author = "The ingot authors"
copyright = author
cargo = tomllib.loads((ROOT / "Cargo.toml").read_text("utf-8"))
release = cargo["workspace"]["package"]["version"]

# What cannot be found is a warning, and so is a page that nothing leads to.
nitpicky = True
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llm.txt",
    "accessible",
    "elsewhere",
    "linked",
    "made",
    "viewer",
]
# Types in docstrings are prose ("str, optional", "a list of names"); names of ingot must exist.
nitpick_ignore_regex = [("py:(class|obj|exc)", r"(?!ingot\.).*"), ("py:class", r"ingot\..*\._.*")]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

# The page of each function and class is made from docs/_templates when the site is built.
templates_path = ["_templates"]
exclude_patterns = ["_templates"]
# On macOS and Windows, `ingot.View` and `ingot.view` would be one file.
autosummary_filename_map = {
    f"ingot.{name}": f"ingot.{name}-class"
    for name in ("Cast", "Check", "Diff", "Download", "Repair", "Stats", "Upload", "View")
} | {
    f"ingot.remap.{name}": f"ingot.remap.{name}-class"
    for name in (
        "Cast",
        "Drop",
        "Plan",
        "Rename",
        "Select",
        "Split",
        "Stack",
        "Transpose",
        "Unwrap",
    )
}
autodoc_mock_imports = ["lightning", "jax", "flax", "tensorflow", "mlx", "paddle"]
autodoc_member_order = "bysource"
# Signatures as they are typed; what each argument takes is prose below it.
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# In a docstring `name` is code, as in Markdown.
default_role = "literal"

html_theme = "furo"
html_title = f"ingot {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

# `llms.txt`, and each page as Markdown at its own address with another ending.
llms_txt_description = (
    "Stores and loads tensors: safetensors and bintensors files, for torch, numpy and others."
)
llms_txt_suffix_mode = "replace"
llms_txt_nested_enabled = False
# The marks `*` and `/` of signatures, and links around cards: their text is written all the same.
llms_txt_suppress_unknown_node_warnings = ["PassthroughTextElement", "abbreviation"]
