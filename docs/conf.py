"""Sphinx's configuration. `make docs` builds the site in `build/docs`, with warnings as errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Generic, get_origin

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gallery  # noqa: E402

project = "aioenv"
author = "The aioenv authors"
copyright = author
release = version = installed_version("aioenv")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "command_pages",
]
templates_path = ["_templates"]
exclude_patterns = ["**/__pycache__", "examples/**.ipynb", "examples/**.py"]
default_role = "code"
suppress_warnings = ["config.cache"]
nitpicky = False

# ------------------------------------------------------------ pages

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline", "attrs_block"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE.parent / "build" / "docs-cache")
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ------------------------------------------------------------ the gallery

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "examples",
    "filename_pattern": r"examples/[^/]+\.py$",  # those that are run: of subfolders none
    "within_subsection_order": "FileNameSortKey",
    "reset_argv": gallery.arguments,
    "image_scrapers": (gallery.pictures,),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "plot_gallery": "True",
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
}

# ------------------------------------------------------------ the reference

MODULES = ("aioenv", "aioenv.sync", "aioenv.stats", "aioenv.envs", "aioenv.testing")
autosummary_generate = True
autosummary_imported_members = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
ADAPTED = ("stable_baselines3", "torch", "tensordict", "rsl_rl", "torchrl", "tianshou")
# also where they are installed: the reference shows our own methods, not those that adapters inherit from them
autodoc_mock_imports = [*ADAPTED]
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes are members of their own, too
napoleon_custom_sections = [("Yields", "returns_style")]
python_use_unqualified_type_names = True
intersphinx_mapping: dict[str, tuple[str, None]] = {}  # the build asks no other site
PUBLIC = {getattr(import_module(name), each) for name in MODULES for each in import_module(name).__all__}


def public_bases(bases: Iterable[Any]) -> Iterator[Any]:
    """Yield base classes; in place of internal ones of this package, which no page describes, their own bases."""
    for base in bases:
        kind = get_origin(base) or base
        if kind.__module__.startswith("aioenv.") and kind not in PUBLIC:
            yield from public_bases(vars(kind).get("__orig_bases__", kind.__bases__))
        else:
            yield base


def hide_internal_bases(app: Any, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Let the reference show public base classes alone."""
    shown = {get_origin(base) or base: base for base in public_bases(bases)}
    bases[:] = [base for kind, base in shown.items() if kind not in (object, Generic)] or [object]


def setup(app: Any) -> None:
    """Connect this file's own functions to Sphinx."""
    app.connect("autodoc-process-bases", hide_internal_bases)


# ------------------------------------------------------------ the looks

html_theme = "furo"
html_title = "aioenv"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b5cad", "color-brand-content": "#0b5cad"},
    "dark_css_variables": {"color-brand-primary": "#7ab8ff", "color-brand-content": "#7ab8ff"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
