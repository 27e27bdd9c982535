"""Files on a real server, nginx: with TLS, with compression, and with replaced files."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support import shards
from support.errors import raises
from support.servers import unused_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(NGINX is None or OPENSSL is None, reason="nginx or openssl is not installed")

TENSORS = {
    "a": np.arange(2_000_000),
    "b": np.arange(50, dtype=np.float32),
    "zeros": np.zeros(1_000_000, np.int8),
}

CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/tmp; proxy_temp_path {folder}/tmp; fastcgi_temp_path {folder}/tmp;
  uwsgi_temp_path {folder}/tmp; scgi_temp_path {folder}/tmp;
  gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any;
  server {{
    listen 127.0.0.1:{http};
    listen 127.0.0.1:{https} ssl;
    listen 127.0.0.2:{https} ssl;
    ssl_certificate {folder}/cert.pem;
    ssl_certificate_key {folder}/key.pem;
    root {folder}/www;
    location /slow/ {{ alias {folder}/www/; limit_rate 4m; }}
    location /to-http/ {{ return 302 http://127.0.0.1:{http}/model.safetensors; }}
  }}
}}
"""


@dataclass
class Nginx:
    folder: Path
    http: int
    https: int

    @property
    def options(self) -> dict[str, str]:
        return {"ca_file": str(self.folder / "cert.pem")}

    def requests(self, after: int = -1, below: str = "") -> int:
        """Wait until nginx has logged more than `after` requests, and return their number. It logs after it
        answers.

        Only requests whose path begins with `below` count.
        """
        for _ in range(3000):
            lines = (self.folder / "access.log").read_text().splitlines()
            count = sum(f'"GET {below}' in line for line in lines)
            if count > after:
                break
            time.sleep(0.02)
        return count


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "www").mkdir()
    # If nginx drops root, its new user must be able to enter this folder.
    for parent in [folder, *folder.parents[:2]]:
        if parent.stat().st_uid == os.getuid():
            parent.chmod(0o755)
    ingot.numpy.save_file(TENSORS, folder / "www" / "model.safetensors")
    key = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-subj", "/CN=loopback"]
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *key]
        + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        + ["-addext", "basicConstraints=critical,CA:FALSE"],
        check=True,
        capture_output=True,
    )
    server = Nginx(folder, unused_port(), unused_port())
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, http=server.http, https=server.https))
    log = folder / "start.log"
    with log.open("wb") as errors:
        process = subprocess.Popen([NGINX, "-p", folder, "-c", config], stderr=errors)
    try:
        for _ in range(600):
            if process.poll() is not None:
                pytest.fail(f"nginx did not start: {log.read_text()}")
            try:
                ingot.safe_open(
                    f"http://127.0.0.1:{server.http}/model.safetensors", "np", storage_options={"retries": 0}
                )
                break
            except OSError:
                time.sleep(0.1)
        # Wait until this request is logged, before a test counts its own.
        server.requests(after=0)
        yield server
    finally:
        process.terminate()
        process.wait()


def same(found: dict[str, np.ndarray]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        np.array_equal(found[name], TENSORS[name]) for name in found
    )


def test_nginx_file_is_read_whole_and_in_part(nginx: Nginx) -> None:
    url = f"http://127.0.0.1:{nginx.http}/model.safetensors"
    # The log may get requests of other tests late.
    file = ingot.safe_open(f"{url}?once", "np")
    assert nginx.requests(0, "/model.safetensors?once") == 1
    assert same(ingot.numpy.load_file(url))
    assert file.get_slice("a")[1_000_000:1_000_003].tolist() == [1_000_000, 1_000_001, 1_000_002]


def test_nginx_tls_with_a_custom_certificate(nginx: Nginx) -> None:
    for host in ("127.0.0.1", "localhost"):
        url = f"https://{host}:{nginx.https}/model.safetensors"
        assert same(ingot.numpy.load_file(url, storage_options=nginx.options))


def test_nginx_tls_serves_a_sharded_checkpoint(nginx: Nginx, tmp_path: Path) -> None:
    for name, data in shards.checkpoint().items():
        path = nginx.folder / "www" / "sharded" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    url = f"https://localhost:{nginx.https}/sharded/{shards.INDEX}"
    file = ingot.safe_open(url, "np", storage_options=nginx.options)
    file.parameter_count()
    assert nginx.requests(len(shards.NAMES), "/sharded/") == 1 + len(shards.NAMES)
    assert shards.same(file.get_tensors())
    ingot.download(url, tmp_path, storage_options=nginx.options)
    assert {name: (tmp_path / name).read_bytes() for name in shards.checkpoint()} == shards.checkpoint()
    (nginx.folder / "www" / "sharded" / shards.NAMES[2]).unlink()
    with pytest.raises(FileNotFoundError, match="404") as caught:
        ingot.numpy.load_file(url, storage_options=nginx.options)
    assert caught.value.filename.startswith(f"https://localhost:{nginx.https}/sharded/more/")


def test_n13_untrusted_certificate_is_rejected(nginx: Nginx) -> None:
    url = f"https://localhost:{nginx.https}/model.safetensors"
    with raises(ingot.StorageError, code="tls") as caught:
        ingot.safe_open(url, "np")
    assert str(caught.value).startswith(url)


def test_n13_certificate_of_another_host_is_rejected(nginx: Nginx) -> None:
    with raises(ingot.StorageError, code="tls") as caught:
        ingot.safe_open(f"https://127.0.0.2:{nginx.https}/x", "np", storage_options=nginx.options)
    assert "127.0.0.2" in str(caught.value)


def test_n2_redirect_from_tls_is_rejected(nginx: Nginx) -> None:
    with raises(ingot.StorageError, "from https: to http:", code="redirect-refused"):
        ingot.safe_open(f"https://localhost:{nginx.https}/to-http/", "np", storage_options=nginx.options)


def test_nginx_slow_answers_are_awaited(nginx: Nginx) -> None:
    assert same(ingot.numpy.load_file(f"http://127.0.0.1:{nginx.http}/slow/model.safetensors"))
