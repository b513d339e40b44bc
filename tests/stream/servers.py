"""Local servers with addresses for sources and sinks: S3's API by moto, HTTP with and without ranges, and memory."""

from __future__ import annotations

import http.server
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from tests.waiting import ended

BUCKET = "bucket"


class _Plain(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, whole."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Ranges(_Plain):
    """The same, of which a range may be asked for."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        first, last = map(int, asked.groups())
        content = path.read_bytes()
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)


@contextmanager
def web(folder: Path, ranges: bool = True) -> Iterator[str]:
    """Serve a folder by HTTP, and yield its address."""
    handler = partial(_Ranges if ranges else _Plain, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            ended(thread)


@contextmanager
def s3() -> Iterator[str]:
    """Run S3's API with one bucket, which the environment names to this process and to workers; yield its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    said = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        # What is kept knows the address of this server.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        server.stop()


def upload(folder: Path, address: str) -> None:
    """Put all files of a folder below an address."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with fsspec.open(f"{address}/{path.relative_to(folder).as_posix()}", "wb") as file:
                file.write(path.read_bytes())


def objects(address: str) -> dict[str, bytes]:
    """Return all objects below an address by their relative names."""
    files, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
    return {name[len(root) :].lstrip("/"): files.cat_file(name) for name in files.find(root)}
