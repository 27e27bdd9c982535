"""The viewer as one file, which opens by a double click: alone, or with a report in it.

Browsers load no modules from a folder that is opened so. Each module becomes a function that gives what it
exports, in one script, which is that of the page and that of its worker.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from ingot.errors import SafetensorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]*)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)
_AGAIN = re.compile(r"^export \{([^}]*)\};\n", re.MULTILINE)
# Lines that are comments and nothing else. They hold a third of the bytes.
_COMMENT = re.compile(r"^[ ]*(?://.*|/\*\*.*|\*(?: .*|/)?)\n", re.MULTILINE)
# The page may ask for what its user opens, and for nothing else.
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src https: blob:; "
    "img-src data: blob:; worker-src blob:; base-uri 'none'; form-action 'none'"
)


class Parts:
    """The script and the style of the page, and the hashes by which a policy allows them."""

    def __init__(self, web: Traversable) -> None:
        self.script = bundle(web)
        self.style = (web / "viewer" / "viewer.css").read_text("utf-8")
        self.hashes = {"script": _hash(self.script), "style": _hash(self.style)}

    def page(self, head: str = "", body: str = "") -> str:
        """The document, with more elements in its head, and in its body before the script."""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'{head}<title>ingot</title>\n<link rel="icon" href="data:,">\n<style>{self.style}</style>\n'
            f'</head>\n<body>\n{body}<script id="viewer">{self.script}</script>\n</body>\n</html>\n'
        )


def page(report: str | None = None) -> str:
    """The viewer as HTML, with a report of `report.made` in it or with nothing open.

    Parameters
    ----------
    report
        JSON.
    """
    parts = Parts(files("ingot") / "web")
    policy = _POLICY.format(**parts.hashes)
    # The one thing in it that comes from a file: nothing in it may end the element.
    data = "" if report is None else report.replace("<", "\\u003c")
    element = "" if report is None else f'<script type="application/json" id="report">{data}</script>\n'
    return parts.page(f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n', element)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def bundle(web: Traversable) -> str:
    """One script of all modules that the page and the worker need."""
    modules: dict[str, str] = {}
    for entry in ("viewer/main.js", "viewer/worker.js"):
        _add(web, entry, modules)
    body = "".join(modules.values())
    return (
        f'"use strict";\n{body}'
        f'if (typeof document === "undefined") {_name("viewer/worker.js")}.listen();\n'
        f"else {_name('viewer/main.js')}.start();\n"
    )


def _add(web: Traversable, path: str, modules: dict[str, str]) -> None:
    """Put a module after those that it needs."""
    if path in modules:
        return
    text = without_comments(web.joinpath(*path.split("/")).read_text("utf-8"))
    folder = path.rpartition("/")[0]
    below = {given: _resolved(folder, given) for _, given in _IMPORT.findall(text)}
    for needed in below.values():
        _add(web, needed, modules)

    def imported(match: re.Match[str]) -> str:
        names = match[1].replace(" as ", ": ")
        return f"const {{{names}}} = {_name(below[match[2]])};\n"

    exported = [name for _, name in _EXPORT.findall(text)]
    exported += [name.strip() for names in _AGAIN.findall(text) for name in names.split(",") if name.strip()]
    text = _AGAIN.sub("", _EXPORT.sub(r"\1", _IMPORT.sub(imported, text)))
    if re.search(r"^(?:import|export)\b|\bimport\(|\bimport\.meta\b", text, re.MULTILINE):
        raise SafetensorError(f"{path}: has an import or an export that cannot be put into one file")
    if "</script" in text.lower() or "<!--" in text:
        raise SafetensorError(f"{path}: has text that would end the script")
    modules[path] = f"const {_name(path)} = (() => {{\n{text}return {{ {', '.join(exported)} }};\n}})();\n"


def _resolved(folder: str, given: str) -> str:
    parts = folder.split("/") if folder else []
    for part in given.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _name(path: str) -> str:
    return "$" + re.sub(r"\W", "_", path.removesuffix(".js"))


def without_comments(text: str) -> str:
    """A module without the lines that are comments. In a style sheet such a line may be a rule for `*`."""
    return _COMMENT.sub("", text)
