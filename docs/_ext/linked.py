"""Links from names in code font, such as `ingot.verify`, to their places in the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

if TYPE_CHECKING:
    from sphinx.application import Sphinx

#: Pages of one function or class. Their docstrings name the rest of the module without its name.
GENERATED = "reference/python/generated/"


def link(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Link the names on a page that the reference documents."""
    objects = app.env.domains.python_domain.objects
    documented = page.removeprefix(GENERATED).removesuffix("-class") if page.startswith(GENERATED) else ""
    # `keys` is an argument on most pages, and a method of one class.
    arguments = {node.astext().partition("=")[0] for node in doctree.findall(addnodes.desc_parameter)}
    linked = [*doctree.findall(nodes.reference), *doctree.findall(nodes.title)]
    inside = {id(node) for outer in linked for node in outer.findall()}
    for node in [*doctree.findall(nodes.literal), *doctree.findall(nodes.emphasis)]:
        text = node.astext().removesuffix("()")
        name = next((name for name in full_names(text, documented) if name in objects), documented)
        if name != documented and text not in arguments and id(node) not in inside:
            target = objects[name]
            words = node.deepcopy()
            node.replace_self(make_refnode(app.builder, page, target.docname, target.node_id, words, name))


def full_names(text: str, documented: str) -> Iterator[str]:
    """Return the full names that a text may stand for, on the page of `documented`, or on another page."""
    yield f"ingot.errors.{text}"
    if documented:
        yield f"{documented}.{text}"
        yield f"{documented.rpartition('.')[0]}.{text}"
        yield f"ingot.{text}"
    if text.startswith("ingot."):
        yield text
        # The package has the names of two modules too.
        yield f"ingot.errors.{text.removeprefix('ingot.')}"
        yield f"ingot.typing.{text.removeprefix('ingot.')}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the links to the build."""
    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
