"""Sphinx's settings for the pages in this folder; `make docs` builds them into build/docs."""

from ampfuse import __version__

project, author = "ampfuse", "ampfuse contributors"
version = release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["figures"]
# Frameworks whose classes ours extend: their names are enough here.
autodoc_mock_imports = ["accelerate", "lightning", "timm", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
napoleon_use_param = False  # "lr, betas: as in torch" is one entry
default_role = "literal"  # `name` in a docstring is code

# Every name inside is checked; torch's are not linked, so a build needs no network.
nitpicky = True
# Types of annotations are left out that are not ours, or not public.
nitpick_ignore_regex = [("py:.*", r"(?!ampfuse).*"), ("py:class", r"ampfuse\.(_\w+|\w+\.\w+)\.\w+")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme, pygments_dark_style = "furo", "github-dark"
html_show_copyright = False
html_title = f"ampfuse {version}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
