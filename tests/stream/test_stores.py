"""Stores without a server: leases of several sinks, secrets, failures of the web, and what addresses name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.lower.prepared.remote import told, web_failure, without_secrets
from dask_ferro.stream import places
from dask_ferro.stream.parts import sweep
from dask_ferro.stream.stores import addresses, leases
from tests.each import every
from tests.graphs import mlp
from tests.stream.servers import objects
from tests.waiting import until

SINKS = [f"memory://leases/{name}.zarr" for name in "abcd"]


@pytest.fixture
def store() -> Iterator[Callable[[str], dict[str, Any]]]:
    """The record in a sink's lock; after the test nothing may be left."""
    yield lambda sink: json.loads(addresses.read(f"{sink}.ferro-lock"))
    assert objects("memory://leases") == {}


def left(sink: str, token: str = "dead", text: bytes | None = None) -> None:
    """Leave a lock of a process that has ended."""
    addresses.put(f"{sink}.ferro-lock", text or json.dumps({"token": token}).encode())


def sleeping(monkeypatch: pytest.MonkeyPatch, each: Callable[[int], None]) -> list[float]:
    """Return the seconds that leases are watched for; `each` is called with the number of naps instead."""
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        each(len(naps))

    monkeypatch.setattr(leases, "time", SimpleNamespace(sleep=nap))
    return naps


# ---- leases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [SINKS[:1], SINKS[1:], SINKS], ids=["one", "three", "all"])
def test_stale_leases_are_watched_together(
    stale: list[str], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, sink in enumerate(stale):
        left(sink, text=b"no record" if number == 0 else None)
    naps = sleeping(monkeypatch, lambda number: None)
    with leases.held(SINKS) as held:
        assert sum(naps) == pytest.approx(leases.LEASE_S)
        for lock in held:
            lock.check()


def test_a_lease_is_renewed_while_others_are_watched(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left(SINKS[1])

    def renewed(number: int) -> None:
        until(lambda: store(SINKS[0])["renewals"] >= number, "a renewal")

    naps = sleeping(monkeypatch, renewed)
    monkeypatch.setattr(leases, "LEASE_S", 0.12)
    with leases.held(SINKS[:2]):
        assert store(SINKS[0])["renewals"] >= len(naps) > 0


@pytest.mark.parametrize("renewed", range(4))
def test_one_that_is_renewed_refuses_all(renewed: int, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for sink in SINKS:
        left(sink)
    sleeping(monkeypatch, lambda number: left(SINKS[renewed], "alive"))
    with pytest.raises(ff.ConfigError, match=f"{SINKS[renewed]}' is being written"), leases.held(SINKS):
        pass
    addresses.remove([f"{sink}.ferro-lock" for sink in SINKS])


def test_of_two_runs_one_gets_all_sinks(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 1.0)
    with leases.held(SINKS) as held:
        for some in (SINKS, SINKS[2:], SINKS[1:3]):
            with pytest.raises(ff.ConfigError, match="is being written"), leases.held(some):
                pass
        for lock in held:
            lock.check()


def test_one_that_ends_meanwhile_is_taken(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left(SINKS[2])
    naps = sleeping(monkeypatch, lambda number: addresses.remove([f"{SINKS[2]}.ferro-lock"]))
    with leases.held(SINKS) as held:
        assert (len(held), len(naps)) == (4, 1)


# ---- secrets ----------------------------------------------------------------------------------------------

SHOWN = [
    ("https://me:SECRET@host/net.onnx?signature=SECRET#SECRET", "https://host/net.onnx"),
    ("simplecache::http://u:SECRET@h/x.npy", "simplecache::http://h/x.npy"),
    ("zip://a@b.npy::blockcache::http://u:SECRET@h/x.zip?SECRET", "zip://b.npy::blockcache::http://h/x.zip"),
    ("s3://key:sec/SECRET@bucket/o.parquet", "s3://bucket/o.parquet"),
    ("s3://key:SEC::RET@bucket/o.parquet", "s3://bucket/o.parquet"),
    ("s3://key:12/SECRET@bucket/o.parquet", "s3://bucket/o.parquet"),
    ("s3://key:SEC?RET@bucket/o.parquet", "s3://bucket/o.parquet"),
    ("http://me:SEC@RET/w0rd@host/x.npy", "http://host/x.npy"),
    ("http://SECRET@host:80/x.npy", "http://host:80/x.npy"),
    ("http://u:SECRET@[bad/x.npy", "http://[bad/x.npy"),
    ("http://host:80/a@b/x.npy?mail=a@b", "http://host:80/a@b/x.npy"),
    ("http://host/a@b/x.npy", "http://host/a@b/x.npy"),
    ("s3://bucket/a#1 b?.parquet", "s3://bucket/a#1 b?.parquet"),
    ("s3://bucket/a.parquet?X-Amz-Signature=SECRET", "s3://bucket/a.parquet"),
    ("memory:///b/x.npy", "memory:///b/x.npy"),
]


@every(("address", "wanted"), SHOWN)
def test_an_address_is_shown_without_secrets(address: str, wanted: str) -> None:
    assert without_secrets(address) == wanted
    assert without_secrets(wanted) == wanted or "@" in wanted


TEXTS = [
    ("s3://u:SECRET@h/x", 'Invalid bucket name "u:SECRET@h"', 'Invalid bucket name "h"'),
    ("s3://u:SECRET/PASS@h/x", 'Invalid bucket name "u:SECRET"', 'Invalid bucket name "***"'),
    ("s3://u:SECRET/PASS@h/x", "no key 'PASS@h/x' in it", "no key '***@h/x' in it"),
    ("http://me:p@SECRET/PASS@host/x", "Cannot connect to host SECRET:80", "Cannot connect to host ***:80"),
    ("http://me:SEC/RET@h/x", "GET http://me:SEC/RET@h/x?a=PASS", "GET http://h/x"),
    ("http://me:SEC+RET@h/x", "user me:SEC%2BRET@h", "user h"),
    ("simplecache::s3://u:SECRET@h/x", "bucket u:SECRET@h, not SECRET", "bucket h, not ***"),
]


@pytest.mark.parametrize(("address", "text", "wanted"), TEXTS)
def test_an_error_is_told_without_secrets(address: str, text: str, wanted: str) -> None:
    assert told(OSError(text), address) == f"OSError: {wanted}"


@pytest.mark.parametrize(
    "sink", ["memory://AKIA:ab/SECRET@bucket/x.parquet", "s3://AKIA:12/SECRET@bucket/x.zarr"]
)
def test_a_sink_with_a_password_is_refused(sink: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 6), np.float32))
    with pytest.raises(ff.ConfigError, match="has a user, a password or a query") as error:
        ff.run(mlp(), tmp_path / "x.npy", sink)
    assert "SECRET" not in str(error.value)


# ---- failures ---------------------------------------------------------------------------------------------


class Answer(Exception):
    """An answer of a web server, as aiohttp raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} of http://me:SECRET@host/x.npy")
        self.status, self.message = status, "words"


FAILURES = [
    (Answer(404), None),
    (Answer(410), None),
    (FileNotFoundError("x"), None),
    (Answer(401), r"its server answers with status 401 \(words\)"),
    (Answer(503), r"its server answers with status 503 \(words\)"),
    (OSError("no route to me:SECRET@host"), "cannot be reached: OSError: no route to host"),
    (None, None),
]


@pytest.mark.parametrize(("cause", "words"), FAILURES, ids=lambda value: repr(value)[:20])
def test_a_failure_of_the_web_is_not_a_missing_file(
    cause: Exception | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    from fsspec.implementations.http import HTTPFileSystem

    def info(self: Any, path: str) -> Any:
        raise FileNotFoundError(path) from cause

    # An instance that fsspec has kept has the method of before.
    HTTPFileSystem.clear_instance_cache()
    monkeypatch.setattr(HTTPFileSystem, "info", info)
    address = "http://me:SECRET@host/x.npy"
    kind = FileNotFoundError if words is None else OSError
    with pytest.raises(kind, match=words or "it does not exist") as error:
        addresses.entry(address)
    assert type(error.value) is kind
    assert "SECRET" not in str(error.value)
    if words is None:
        assert not addresses.exists(address)
        return
    with pytest.raises(OSError, match=words):
        addresses.exists(address)


def test_a_cause_is_looked_for_behind_others() -> None:
    error = FileNotFoundError("x")
    error.__cause__ = RuntimeError("retried")
    error.__cause__.__cause__ = Answer(403)
    assert web_failure(error, "http://host/x") == "its server answers with status 403 (words)"


UNREADABLE = [
    "foo://b/x",
    "foo://b/x.npy",
    "foo://b/x.csv",
    "http://u:SECRET@[bad/x.npy",
    "ftp://127.0.0.1:9/x",
]


@pytest.mark.parametrize("source", UNREADABLE)
def test_what_cannot_be_read_is_a_configuration_error(source: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(ff.ConfigError, match=r"cannot be read|does not exist") as error:
        ff.run(mlp(), source, tmp_path / "y.npy")
    assert "SECRET" not in str(error.value)


# ---- what addresses name ----------------------------------------------------------------------------------


@every(
    ("source", "sink", "same"),
    [
        ("memory:///b/x.zarr", "memory://b/x.zarr", True),
        ("memory://b/x.zarr/y", "memory:///b/x.zarr", True),
        ("s3a://b/x.zarr", "s3://b/x.zarr", True),
        ("S3://b/x.zarr", "s3://b/x.zarr", True),
        ("s3://b/x.zarr", "memory://b/x.zarr", False),
        ("memory://b/x#1.zarr", "memory://b/x#2.zarr", False),
        ("memory://b/x.zarr", "memory://b/x.zarr.zarr", False),
        ("/b/x.zarr", "memory://b/x.zarr", False),
        ("file:///nowhere/x.zarr", "/nowhere/x.zarr", True),
    ],
)
def test_aliases_of_an_address_are_the_same(source: str, sink: str, same: bool) -> None:
    if "s3" in source.lower():
        pytest.importorskip("s3fs")
    place = places.SinkPath("zarr", addresses.address_of(sink))
    sources = [addresses.address_of(source)]
    if not same:
        places.check_places(sources, [place], f"{sink}.ferro-progress")
        return
    with pytest.raises(ff.ConfigError, match="are the same"):
        places.check_places(sources, [place], f"{sink}.ferro-progress")


def test_a_number_sign_and_a_scheme_in_capitals_are_accepted(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 6), np.float32))
    for sink in ("memory://signs/y#1.parquet", "MEMORY://signs/y#2.parquet"):
        assert ff.run(mlp(), tmp_path / "x.npy", sink).rows == 3
    assert {name.partition("/")[0] for name in objects("memory://signs")} >= {"y#1.parquet", "y#2.parquet"}


def test_a_sweep_lists_what_begins_as_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    files, asked = fsspec.filesystem("memory"), []
    find = MemoryFileSystem.find
    run, other = "a" * 12, "b" * 12
    kept = ["x.parquet/part-0", f"x.parquet.{run}.ferro-part/_begun", f"xx.parquet.{other}.ferro-part/_begun"]
    for name in (*kept, f"x.parquet.{other}.ferro-part/part-0", f"x.parquet.{other}.ferro-old/part-0"):
        files.pipe_file(f"/sweeps/{name}", b"")

    def counted(self: Any, path: str, *args: Any, **options: Any) -> Any:
        asked.append((path, options.get("prefix")))
        return find(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "find", counted)
    monkeypatch.setattr(addresses, "names_in", lambda folder: pytest.fail(f"{folder} was listed"))
    sweep([places.SinkPath("parquet", addresses.address_of("memory://sweeps/x.parquet"))], run)
    assert asked[0] == ("/sweeps", "x.parquet.")
    assert sorted(objects("memory://sweeps")) == sorted(kept)
