"""Models at addresses: a local HTTP server, and memory."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import fsspec
import numpy as np
import onnx
import pytest

import dask_ferro as ff
from tests.graphs import close, mlp, mlp_reference
from tests.waiting import BOUND_S, ended

X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Any) -> Iterator[str]:
    onnx.save(mlp(), tmp_path / "net.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path))
    ) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            ended(thread)


@pytest.mark.parametrize("query", ["", "?token=a/b.c"])
def test_a_model_of_a_web_server(server: str, query: str) -> None:
    pytest.importorskip("aiohttp")
    model = ff.from_onnx(f"{server}/net.onnx{query}")
    assert model.name == "net"
    close(model(X, batch_size=4).compute(scheduler="sync"), mlp_reference(X))
    close(model.predict(X), mlp_reference(X))


@pytest.mark.cluster
def test_a_model_in_memory_travels_to_workers() -> None:
    from distributed import Client, LocalCluster

    with fsspec.open("memory://models/net.onnx", "wb") as file:
        file.write(mlp().SerializeToString())
    model = ff.from_onnx("memory://models/net.onnx")
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        close(client.submit(model.predict, X).result(timeout=BOUND_S), mlp_reference(X))
        close(client.compute(model(X, batch_size=3)).result(timeout=BOUND_S), mlp_reference(X))


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        pytest.param("{}/none.onnx", ff.ModelError, "none.onnx' cannot be read", id="not there"),
        pytest.param("{}/text.onnx", ff.ModelError, "not an ONNX|protobuf|no ONNX", id="no model"),
        pytest.param("nosuch://net.onnx", ff.InputError, "wanted a path, or an address", id="no such kind"),
    ],
)
def test_what_cannot_be_read_is_told(server: str, address: str, kind: Any, words: str) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(kind, match=words):
        ff.from_onnx(address.format(server))


def test_no_error_has_a_password() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(ff.ModelError) as error:
        ff.from_onnx("http://me:SECRET@127.0.0.1:9/net.onnx?signature=SECRET")
    assert "http://127.0.0.1:9/net.onnx" in str(error.value)
    assert "SECRET" not in str(error.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **options: Any) -> Any:
        raise ImportError("Please install s3fs to access S3")

    monkeypatch.setattr(fsspec, "open", missing)
    with pytest.raises(ff.InputError, match=r"s3://b/net.onnx.*install s3fs"):
        ff.from_onnx("s3://b/net.onnx")
