"""The viewer in Firefox, if it is installed: another browser engine shows the same page.

Firefox itself implements WebDriver BiDi, so that no driver is needed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot._view.server import Server
from ingot._view.shelf import Shelf
from support.models import minilm

NAME = "embeddings.word_embeddings.weight"
# Wait for a text on the page, for at most a minute.
SAYS = """(text) => new Promise((done) => {
  const look = () => (document.body.innerText.includes(text)
    ? done(document.querySelector("main").innerText) : setTimeout(look, 20));
  setTimeout(() => done("never: " + document.body.innerText), 60_000);
  look();
})"""


class Firefox:
    """A tab of a Firefox, and its errors."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.faults: list[str] = []
        self.last = 0
        self.ask("session.new", capabilities={})
        self.ask("session.subscribe", events=["log.entryAdded"])
        self.context = self.ask("browsingContext.getTree")["contexts"][0]["context"]

    def ask(self, method: str, **params: Any) -> Any:
        self.last += 1
        self.socket.send(json.dumps({"id": self.last, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=90))
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] == "error":
                self.faults.append(str(answer["params"]["text"]))
            if answer.get("id") == self.last:
                assert answer["type"] == "success", answer
                return answer["result"]

    def run(self, function: str, argument: str) -> str:
        found = self.ask(
            "script.callFunction",
            functionDeclaration=function,
            arguments=[{"type": "string", "value": argument}],
            target={"context": self.context},
            awaitPromise=True,
        )
        assert found["type"] == "success", found
        return str(found["result"].get("value"))


@pytest.fixture
def firefox(tmp_path: Path) -> Iterator[Firefox]:
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        pytest.skip("Firefox is not installed")
    client = pytest.importorskip("websockets.sync.client", reason="Firefox is driven by websockets")
    # Firefox must send no requests of its own.
    quiet = {
        "services.settings.server": "data:,",
        "app.normandy.enabled": False,
        "network.captive-portal-service.enabled": False,
    }
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in quiet.items()]
    (tmp_path / "user.js").write_text("".join(lines))
    process = subprocess.Popen(
        [program, "--headless", "--no-remote", "--profile", str(tmp_path), "--remote-debugging-port=0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = next(filter(None, (re.search(r"listening on (ws://\S+)", line) for line in process.stderr)))
        # Pictures of a page are large.
        with client.connect(f"{found[1]}/session", max_size=None) as socket:
            yield Firefox(socket)
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()


def test_firefox_shows_a_model(firefox: Firefox) -> None:
    shelf = Shelf([str(minilm())])
    server = Server(shelf)
    try:
        firefox.ask("browsingContext.navigate", context=firefox.context, url=server.url, wait="complete")
        assert "22,713,728" in firefox.run(SAYS, "Largest tensors")
        go = "(fragment) => { location.hash = fragment; }"
        firefox.run(go, f"t={NAME}&view=statistics")
        statistics = firefox.run(SAYS, "Standard deviation")
        assert "1.0494" in statistics
        assert "0.0556233" in statistics
        firefox.run(go, f"t={NAME}&view=values&w=0,32,0,12")
        assert not firefox.run(SAYS, "-0.019989014").startswith("never")
        firefox.run(go, f"t={NAME}&view=picture")
        assert "Rows 0 to 30,521" in firefox.run(SAYS, "Drag over a part")
        firefox.run(go, "go=map")
        assert "90.9\xa0MB" in firefox.run(SAYS, "Closer")
        assert firefox.faults == []
    finally:
        server.close()
        shelf.close()
