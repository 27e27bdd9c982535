"""`ingot.view`: the viewer in a notebook, or its address for a program."""

from __future__ import annotations

import os
import secrets
from contextlib import closing
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack
from weakref import finalize

from ingot._base.checks import checked_source, is_path
from ingot._base.options import Loading, argument, checked, takes
from ingot._native import is_url, local_path
from ingot._read import door
from ingot._read.handle import safe_open
from ingot.errors import OptionError, SafetensorError
from ingot.typing import NoOptions, Source, StorageOptions

from . import report
from .server import Server
from .shelf import Opened, Shelf, opened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


# Environment variables of notebooks whose browser is on another machine than the kernel.
_REMOTE = (
    *("SSH_CONNECTION", "JUPYTERHUB_SERVICE_PREFIX", "COLAB_RELEASE_TAG", "KUBERNETES_SERVICE_HOST"),
    *("KAGGLE_KERNEL_RUN_TYPE", "CODESPACES", "REMOTE_CONTAINERS"),
)
# The page for browsers that cannot reach the server has only the headers of larger models.
_EMBEDDED_NBYTES = 128 << 20
_FRAME = "position: absolute; inset: 0; width: 100%; height: 100%; border: 0"
# Shows the frame of the server once its page answers, and removes the embedded page.
_SCRIPT = """<script>(() => {{
  const box = document.getElementById("{name}"), [live, page] = box.querySelectorAll("iframe");
  addEventListener("message", function ready({{ source, data }}) {{
    if (source !== live.contentWindow || data !== "ingot ready") return;
    live.style.visibility = "visible";
    page?.remove();
    removeEventListener("message", ready);
  }});
  live.contentWindow?.postMessage("ingot?", "*");
}})()</script>"""
# A notebook on this machine may show the page in a frame.
_ANCESTORS = "http://localhost:* http://127.0.0.1:*"


class View:
    """The viewer of a model, which a notebook displays. `url` is None for a page without a server.

    The server ends with `close`, at the end of a ``with`` block, or with the object.

    Examples
    --------
    >>> view = ingot.view("model.safetensors", how="server")
    >>> view.url.startswith("http://127.0.0.1:")
    True
    >>> view.close()
    """

    def __init__(
        self, server: Server | None, page: str | None, height: int, models: Sequence[str | Opened] = ()
    ) -> None:
        self._server, self._page, self._height, self._models = server, page, height, models
        self._close: finalize[..., Any] | None = None

    @property
    def url(self) -> str | None:
        """The address for browsers on this machine. It contains an access token; treat it as a secret."""
        return None if self._server is None else self._server.url

    def close(self) -> None:
        """Stop the server. May be called more than once, and without a server.

        Examples
        --------
        >>> view = ingot.view("model.safetensors", how="server")
        >>> view.close()
        """
        if self._close is not None:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the page in a frame, and a sentence behind it.

        The frame of a server is hidden until its page answers. Until then, and where the browser cannot reach
        this machine, an embedded page shows the headers, and of small models statistics and thumbnails.
        """
        name = f"ingot-{secrets.token_hex(8)}"
        live = page = script = ""
        if self.url:
            style = f"{_FRAME}; visibility: hidden"
            live = f'<iframe src="{escape(self.url)}" title="ingot" style="{style}"></iframe>'
            script = _SCRIPT.format(name=name)
        if embedded := self._embedded():
            page = (
                f'<iframe sandbox="allow-scripts" srcdoc="{escape(embedded)}" title="ingot" style="{_FRAME}">'
                "</iframe>"
            )
        style = f"position: relative; height: {self._height}px; border: 1px solid #8888; overflow: auto"
        return f'<div id="{name}" style="{style}">{self._sentence()}{live}{page}{script}</div>'

    def _sentence(self) -> str:
        """Return the text behind the frame, for notebooks that show no frames."""
        here = "write the viewer to a file with <code>ingot view MODEL --html report.html</code> and open it"
        if self.url:
            link = f'<a href="{escape(self.url)}" target="_blank" rel="noreferrer">the viewer</a>'
            here = f"open {link} in a browser on the machine of the notebook, or {here}"
        return f'<p style="margin: 16px">If no viewer is shown here, {here}.</p>'

    def _embedded(self) -> str | None:
        """Return a page without a server, or None if a model cannot be read any more."""
        if self._page is not None:
            return self._page
        try:
            return report.page(*map(_embedded_report, self._models))
        except (OSError, SafetensorError):
            return None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a View cannot be pickled, since its server runs in this process: pickle the source and call "
            "ingot.view after unpickling"
        )

    def __repr__(self) -> str:
        return f"<ingot.View {self._server.origin if self._server else 'page'}>"


@takes()
def view(
    source: Source,
    other: Source | None = None,
    *,
    how: Literal["auto", "server", "page"] = "auto",
    height: int = 600,
    storage_options: StorageOptions | None = None,
    **options: Unpack[NoOptions],
) -> View:
    """Show a model in a notebook: its tensors, their statistics, pictures and values.

    Parameters
    ----------
    source : ingot.typing.Source or ingot.safe_open
        The model, as for `ingot.open`, or an open handle, which stays the caller's and has to stay open.
    other : ingot.typing.Source or ingot.safe_open, optional
        A second model, to compare with.
    how : {"auto", "server", "page"}
        ``"server"`` serves the page from this process, for browsers on this machine; tensors are read when
        they are viewed. If the browser does not reach the server, a page without one is shown, with the
        headers, and statistics and thumbnails of local models up to 128 MiB. ``"page"`` makes a page without
        a server, for a browser elsewhere: the whole model is read now, and the page has headers, statistics
        and thumbnails. ``"auto"``, the default, is a page if the environment shows that the notebook runs
        elsewhere (over SSH, JupyterHub, Colab, Kaggle, Codespaces, a dev container, Kubernetes).
    height : int
        The height of the frame in pixels.
    storage_options : dict, optional
        How URLs are reached (`ingot.StorageOptions`). A handle keeps its own options.

    Returns
    -------
    View
        Shown if it is the last expression of a notebook's cell.

    Raises
    ------
    OSError
        A file cannot be opened.
    HeaderError, CheckpointError, StorageError
        A model is invalid or cannot be read, as for `ingot.inspect`.
    OptionError
        `how` is not one of the three, or is ``"page"`` with two models.

    Examples
    --------
    >>> shown = ingot.view("model.safetensors")  # as the last line of a cell, without "shown ="
    >>> shown.close()
    """
    own = {"how": how, "height": height, "storage_options": storage_options}
    given = checked(view, {**own, **options})
    if how == "page" and other is not None:
        raise OptionError(
            "view(): how='page' shows one model: expected no `other`", code="one-model", found=other
        )
    given_models = {"source": source} | ({} if other is None else {"other": other})
    models = [_model(name, one, Loading.among(given)) for name, one in given_models.items()]
    if how == "page" or (how == "auto" and other is None and any(map(os.environ.get, _REMOTE))):
        [model] = [opened(one) if isinstance(one, str) else one for one in models]
        return View(None, report.page(report.made(model)), given["height"])
    shelf = Shelf(models)
    try:
        server = Server(shelf, ancestors=_ANCESTORS)
    except BaseException:
        shelf.close()
        raise
    shown = View(server, None, given["height"], models)
    shown._close = finalize(shown, _ended, server, shelf)
    return shown


def _embedded_report(model: str | Opened) -> str:
    """Return a report of a small local model, or of the headers of another one."""
    if isinstance(model, str):
        with closing((own := opened(model)).handle):
            return report.made(own, max_nbytes=_EMBEDDED_NBYTES)
    is_remote = model.place is not None and is_url(model.place)
    return report.made(model, max_nbytes=0 if is_remote else _EMBEDDED_NBYTES)


def _ended(server: Server, shelf: Shelf) -> None:
    server.close()
    shelf.close()


def _model(name: str, source: Any, how: Loading) -> str | Opened:
    """Return a local path unchanged, since the page reads its files. Open everything else.

    `name` is the name of the argument.
    """
    if isinstance(source, safe_open):
        source._check_open()
        place, options = source._origin
        return Opened(source._checkpoint, place, options)
    handle = door.open_source(argument(view, name, source, checked_source), how)
    if is_path(source) and not (isinstance(source, str) and is_url(source)):
        with closing(handle):
            # Raises as `inspect` does if the model is invalid.
            handle.headers()
        return os.fsdecode(local_path(source))
    return Opened(handle, source if isinstance(source, str) else None, how.storage_options)
