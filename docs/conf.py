"""Settings of the documentation's site; `make docs` builds it, and fails where a link is broken."""

from typing import Any

project = "lightning-pfl"
root_doc = "docs/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/notebooks/*.ipynb",
    "recipes/README.md",
    "benchmarks/README.md",
]
html_theme = "furo"
html_title = "lightning-pfl"
html_static_path = ["static"]
html_css_files = ["formulas.css"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# Notebooks are kept without outputs and run here, so that the site shows what they do now.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# The pages are written to be read as files, too: formulas in tables, and mermaid as text.
suppress_warnings = ["misc.highlighting_failure", "ref.python", "myst.header"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("State", "notes_style"), ("Deviation from the paper", "notes_style")]
napoleon_use_ivar = True
html_math_renderer = "mathml"  # which browsers draw by themselves: the pages need no network


def setup(app: Any) -> None:
    """Register formulas as MathML."""
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))


def inline_formula(translator: Any, node: Any) -> None:
    """Write a formula in a line."""
    _write(translator, node, "inline")


def formula(translator: Any, node: Any) -> None:
    """Write a formula of its own."""
    _write(translator, node, "block")


def _write(translator: Any, node: Any, display: str) -> None:
    from docutils import nodes
    from latex2mathml.converter import convert
    from sphinx.util.math import wrap_displaymath

    text = node.astext().replace(r"\arg\min", r"\operatorname{arg\,min}")  # unknown to it
    if display == "block" and ("\\\\" in text or "&" in text):
        text = wrap_displaymath(text, None, False)
    translator.body.append(convert(text, display=display))
    raise nodes.SkipNode
