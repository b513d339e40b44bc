"""`ff.predict_files` from and to addresses: S3's API, HTTP and memory; every format, changed sources, runs that die,
secrets.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np
import pytest
import zarr

import dask_ferro as ff
from dask_ferro.lower.preparation.remote import error_text, web_failure, without_secrets
from dask_ferro.stream import files
from dask_ferro.stream.endpoints import check_places
from dask_ferro.stream.journal import AddressLock, SinkPath, hold_sinks
from tests.clusters import running
from tests.each import every
from tests.graphs import close, mlp, mlp_reference
from tests.lower.model.test_tables import by_columns
from tests.stream import test_images
from tests.stream.reading import read
from tests.stream.servers import objects, s3, upload, web
from tests.stream.test_cluster import slow
from tests.stream.test_tables import check, sales
from tests.waiting import ended, until

pd = pytest.importorskip("pandas")
PIL = pytest.importorskip("PIL.Image")
for package in ("aiohttp", "s3fs", "moto.server"):
    pytest.importorskip(package)

ROWS, BATCH, KEPT = 60, 25, ["id", "when"]
X = np.random.default_rng(1).standard_normal((ROWS, 6), dtype=np.float32)
FRAME = sales(ROWS)

ARRAYS = ["x.npy", "x.zarr", "g.zarr", "g.zarr/x", "x.parquet"]
TABLES = ["t.parquet", "t.csv", "parts", "parts/*.parquet"]
IMAGES = ["images", "images/*.png"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as files."""
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "x.npy", X)
    zarr.create_array(folder / "x.zarr", data=X, chunks=(20, 6))
    zarr.open_group(folder / "g.zarr", mode="w").create_array("x", data=X, chunks=(20, 6))
    pd.DataFrame({"x": list(X)}).to_parquet(folder / "x.parquet")
    FRAME.to_parquet(folder / "t.parquet", row_group_size=20)
    FRAME.to_csv(folder / "t.csv", index=False)
    (folder / "parts").mkdir()
    for number, name in enumerate(("part 9", "part 10")):
        FRAME.iloc[number * 40 :][:40].to_parquet(folder / "parts" / f"{name}.parquet")
    (folder / "images").mkdir()
    for number in range(5):
        values = np.random.default_rng(number).integers(0, 255, (40, 64, 3), np.uint8)
        PIL.fromarray(values).save(folder / "images" / f"image {number}.png")
    return folder


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3() as address:
        yield address


class Place(NamedTuple):
    """A copy of the sources at an address, and the folder that it is a copy of."""

    address: str
    folder: Path

    def __truediv__(self, name: str) -> str:
        return f"{self.address}/{name}"

    def changed(self, source: str) -> None:
        """Have other rows of the same shape in a source."""
        path = self.folder / source
        if path.suffix == ".npy":
            np.save(path, X + 1)
        elif path.suffix == ".zarr":
            zarr.open_array(path)[:] = X + 1
        else:
            frame = FRAME.assign(price=FRAME["price"].to_numpy()[::-1])
            frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
        if self.address.startswith("http"):
            # HTTP tells whole seconds.
            later = path.stat().st_mtime + 10
            os.utime(path, (later, later))
        else:
            upload(self.folder, self.address)


@contextmanager
def placed(kind: str, folder: Path, bucket: Callable[[], str]) -> Iterator[Place]:
    """Have a folder at an address of a kind."""
    if kind.startswith("http"):
        with web(folder, ranges=kind == "http") as address:
            yield Place(address, folder)
        return
    address = f"{bucket()}/data" if kind == "s3" else "memory://store/data"
    upload(folder, address)
    yield Place(address, folder)
    files.remove(address)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """The sources at an address of a kind, for tests that change nothing."""
    with placed(request.param, data, lambda: request.getfixturevalue("bucket")) as place:
        yield place


@pytest.fixture
def place(request: pytest.FixtureRequest, data: Path, tmp_path: Path) -> Iterator[Place]:
    """A copy of the sources at an address of a kind."""
    shutil.copytree(data, tmp_path / "sources")
    with placed(request.param, tmp_path / "sources", lambda: request.getfixturevalue("bucket")) as place:
        yield place


def run(source: str, sink: Any, **options: Any) -> Any:
    """Run the model that fits a source, by its name."""
    if "images" in source:
        options |= {"preprocess": test_images.pixels}
        return ff.predict_files(test_images.model(), source, sink, **{"batch_size": 2} | options)
    if any(name in source for name in ("/t.", "/parts")):
        return ff.predict_files(
            by_columns(1), source, sink, **{"batch_size": BATCH, "passthrough": KEPT} | options
        )
    return ff.predict_files(mlp(), source, sink, **{"batch_size": BATCH} | options)


def same(folder: Path, source: str, sink: Path) -> None:
    """Check the results of a source in a local sink."""
    if "images" in source:
        found = pd.read_parquet(sink)
        assert [name.rpartition("/")[2] for name in found["path"]] == [f"image {k}.png" for k in range(5)]
        images = [PIL.open(folder / "images" / f"image {k}.png") for k in range(5)]
        means = np.stack([test_images.pixels(image) for image in images]).mean((2, 3))
        close(found[["mean_0", "mean_1", "mean_2"]].to_numpy(), means)
    elif any(name in source for name in ("t.", "parts")):
        check(sink, FRAME, KEPT)
    else:
        close(np.load(sink), mlp_reference(X))


# A web server need not list its files, so it has no folders; S3's server is slow, so it has one source of each kind.
ALL = [*ARRAYS, *TABLES, *IMAGES]
CASES = {
    "memory": ALL,
    "http": [source for source in ALL if not source.startswith(("parts", "images"))],
    "http without ranges": ["x.npy", "t.parquet", "t.csv"],
    "s3": ["x.npy", "g.zarr", "t.csv", "parts/*.parquet", "images"],
}


# ---- sources ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "source"),
    [pytest.param(kind, source, id=f"{source} by {kind}") for kind in CASES for source in CASES[kind]],
    indirect=["served"],
)
def test_a_source_at_an_address_is_read_as_a_path_is(
    served: Place, source: str, data: Path, tmp_path: Path
) -> None:
    sink = tmp_path / ("out.npy" if source in ARRAYS else "out.parquet")
    assert run(served / source, sink).chunks_computed == 3
    same(data, source, sink)
    assert run(served / source, sink).chunks_computed == 0


@pytest.mark.parametrize(
    ("place", "source"),
    [("s3", "t.csv"), *product(["memory", "http"], ["x.npy", "x.zarr", "t.parquet", "t.csv"])],
    indirect=["place"],
)
def test_a_source_that_changed_is_not_resumed(place: Place, source: str, tmp_path: Path) -> None:
    sink = tmp_path / ("out.npy" if source in ARRAYS else "out.parquet")
    run(place / source, sink)
    place.changed(source)
    with pytest.raises(ff.InputError, match=r"of another run: .* source of|the source changed"):
        run(place / source, sink)


@pytest.mark.parametrize(
    ("place", "source"), [("s3", "x.npy"), ("http", "t.parquet"), ("memory", "t.csv")], indirect=["place"]
)
def test_a_source_that_changes_while_it_is_read_ends_the_run(
    place: Place, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = tmp_path / ("out.npy" if source in ARRAYS else "out.parquet")
    put = files.put

    def after_a_chunk(path: str, content: Any) -> None:
        put(path, content)
        if "part-" in path:
            monkeypatch.setattr(files, "put", put)
            place.changed(source)

    monkeypatch.setattr(files, "put", after_a_chunk)
    with pytest.raises((ff.InputError, RuntimeError), match="changed while"):
        run(place / source, sink, batch_size=5)
    assert not sink.exists()


def test_a_pattern_of_paths_is_one_table(data: Path, tmp_path: Path) -> None:
    run(str(data / "parts" / "part *.parquet"), tmp_path / "out.parquet")
    check(tmp_path / "out.parquet", FRAME, KEPT)


# ---- sinks ------------------------------------------------------------------------------------------------

SINKS = [
    ("memory", "t.parquet", "out.parquet"), ("memory", "t.parquet", "deep/in/out.csv"),
    ("memory", "images", "out.parquet"), ("memory", "x.npy", "out.parquet"), ("memory", "x.npy", "out.zarr"),
    ("memory", "x.npy", "out.npy"),
    ("s3", "t.parquet", "out.parquet"), ("s3", "x.npy", "out.zarr"), ("s3", "t.csv", "out.csv"),
]  # fmt: skip


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address of a store, below which is nothing."""
    kind = getattr(request, "param", "memory")
    address = f"{request.getfixturevalue('bucket')}/sinks" if kind == "s3" else "memory://store/sinks"
    yield address
    files.remove(address)


def content(sink: str, folder: Path) -> Path:
    """Return the local copy of an output at an address."""
    copy = folder / sink.rpartition("/")[2]
    shutil.rmtree(copy, ignore_errors=True)
    if sink.endswith((".csv", ".npy")):
        copy.write_bytes(files.read(sink))
        return copy
    for name, there in objects(sink).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(there)
    return copy


def complete(source: str, sink: str, data: Path, folder: Path) -> None:
    """Check an output at an address, of all rows."""
    copy = content(sink, folder)
    if sink.endswith((".csv", ".npy")):
        same(data, source, copy)
        return
    assert (copy / ("zarr.json" if sink.endswith(".zarr") else "_SUCCESS")).exists()
    (copy / "_SUCCESS").unlink(missing_ok=True)
    if source == "x.npy":
        close(read(copy), mlp_reference(X))
    else:
        same(data, source, copy)


@pytest.mark.parametrize(("store", "source", "name"), SINKS, indirect=["store"])
def test_a_sink_at_an_address_is_complete_and_replaced(
    store: str, source: str, name: str, data: Path, tmp_path: Path
) -> None:
    given, sink = str(data / source), f"{store}/{name}"
    assert run(given, sink).chunks_computed == 3
    complete(source, sink, data, tmp_path)
    assert {n for n in objects(store) if ".ferro-" in n} == {f"{name}.ferro-progress/run.json"}
    assert run(given, sink).chunks_computed == 0

    with pytest.raises(ff.InputError, match=r"is of another run: .*batch \("):
        run(given, sink, batch_size=3)
    assert run(given, sink, batch_size=3, overwrite=True).chunks_computed > 1
    complete(source, sink, data, tmp_path)

    last = sink if name.endswith((".csv", ".npy")) else f"{sink}/{max(set(objects(sink)) - {'zarr.json'})}"
    files.put(last, b"other")
    for options, said in (
        ({"batch_size": 3}, "changed since"),
        ({"overwrite": True}, "it has changed since"),
    ):
        with pytest.raises(ff.InputError, match=said):
            run(given, sink, **options)


def test_what_ff_run_did_not_write_is_kept(store: str, data: Path) -> None:
    sink = f"{store}/out.parquet"
    files.put(f"{sink}/part-000000.parquet", b"theirs")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(ff.InputError, match="not, or not only, an output"):
            run(str(data / "x.npy"), sink, **options)
    assert objects(sink) == {"part-000000.parquet": b"theirs"}


# ---- runs that die, and runs at once --------------------------------------------------------------------


class Life:
    """A store that lets a process change it so many times, and then no more, as if the process was killed."""

    def __init__(self) -> None:
        self.left, self.lock = 10**6, threading.RLock()
        self.seen: Callable[[], None] = lambda: None

    def counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the file system that counts, and that has its state looked at after each change."""

        def counted(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                if self.left <= 0:
                    raise OSError("killed")
                self.left -= 1
                try:
                    return change(*arguments, **options)
                finally:
                    self.seen()

        return counted


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    from fsspec.implementations.memory import MemoryFileSystem

    found = Life()
    for name in ("pipe_file", "cp_file", "rm", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, found.counted(getattr(MemoryFileSystem, name)))
    return found


@pytest.mark.parametrize(
    ("name", "replaces"), [("out.zarr", False), ("out.parquet", True)], ids=["a new one", "another's place"]
)
def test_a_run_that_dies_at_any_step_resumes_and_shows_nothing_half_made(
    name: str, replaces: bool, data: Path, tmp_path: Path, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that died has left its lock.
    monkeypatch.setattr("dask_ferro.stream.journal._is_alive", lambda pid: False)
    given, step, died = str(data / "x.npy"), 0, True
    while died:
        sink = f"memory://dying/{replaces}/{step}/{name}"
        if replaces:
            run(given, sink, batch_size=30)
        life.seen = partial(whole_or_none, sink)
        life.left = step
        with suppress(ff.InputError, RuntimeError, OSError):
            run(given, sink, overwrite=replaces)
        died, life.left = life.left == 0, 10**6
        summary = run(given, sink, overwrite=replaces)
        assert summary.rows == ROWS
        complete("x.npy", sink, data, tmp_path)
        life.seen = lambda: None
        step += 1
    assert step > 20


def whole_or_none(sink: str) -> None:
    """Check that an output at an address has the mark of a complete one only while it has all chunks of one run."""
    names = set(objects(sink))
    chunks = names - {"_SUCCESS", "zarr.json"}
    if names - chunks:
        # Of 60 rows, a run has 3 chunks by 25, and 2 by 30.
        assert len(chunks) in (2, 3), sorted(names)


def test_a_sink_at_an_address_has_one_run_at_a_time(store: str) -> None:
    with hold_sinks([f"{store}/a.zarr", f"{store}/b.zarr"]):
        said = r"b.zarr' is being written by another ff.predict_files: process \d+ on host.*remove '.*zarr.ferro-lock'"
        with pytest.raises(ff.InputError, match=said), hold_sinks([f"{store}/b.zarr"]):
            pass
        with hold_sinks([f"{store}/c.zarr"]):
            pass
    assert objects(store) == {}


def test_a_lock_of_a_process_that_ended_is_taken_over_and_its_holder_finds_out(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = AddressLock(f"{store}/a.zarr"), AddressLock(f"{store}/a.zarr")
    first.__enter__()
    monkeypatch.setattr("dask_ferro.stream.journal._is_alive", lambda pid: False)
    second.__enter__()
    with pytest.raises(ff.InputError, match="was removed or replaced"):
        first.check()
    first.__exit__()
    second.check()
    second.__exit__()
    assert objects(store) == {}
    files.put(first.path, b'{"host": "far", "pid": 7, "since": "2026-01-01"}')
    with pytest.raises(
        ff.InputError, match=r"process 7 on host 'far', since 2026-01-01.*if that process has ended"
    ):
        first.__enter__()


def chunks_at(store: str) -> list[str]:
    """Return the objects of chunks below an address, wherever a run keeps them until it is complete."""
    # Only listed: what is read may be gone by then.
    return [name for name in files.find(store) if re.search(r"/part-\d+\.parquet$|/c/\d+/", name)]


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["y.parquet", pytest.param("y.zarr", marks=pytest.mark.soak)])
@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_worker_that_is_killed_between_two_addresses_loses_and_repeats_nothing(
    store: str, name: str, data: Path, tmp_path: Path
) -> None:
    """The only worker, in the middle: its nanny starts another, which knows what is done by its objects."""
    given, sink = f"{store}/x.zarr", f"{store}/out/{name}"
    upload(data / "x.zarr", given)
    # Dask closes the nanny of a worker that is away 15 s after a death, which a start under load may take.
    kept = {"distributed.deploy.lost-worker-timeout": "10 minutes"}
    spawned = {"distributed.worker.multiprocessing-method": "spawn"}
    with dask.config.set(kept | spawned), running(1, threads=2) as client:
        [victim] = client.run(os.getpid).values()

        def kill() -> None:
            until(lambda: len(chunks_at(f"{store}/out")) >= 4, "four chunks")
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        summary = ff.predict_files(slow(), given, sink, batch_size=3, client=client)
        ended(killer)
        assert victim not in client.run(os.getpid).values(), "the worker was not killed in the middle"
    assert (summary.rows, summary.chunks_computed, summary.chunks_reused) == (ROWS, 20, 0)
    assert len(chunks_at(f"{store}/out")) == 20
    np.testing.assert_array_equal(read(content(sink, tmp_path)), np.maximum(X, 0))
    assert ff.predict_files(slow(), given, sink, batch_size=3).chunks_computed == 0


# ---- what is refused, and what is never shown -------------------------------------------------------------


@every(
    ("sink", "words"),
    [
        pytest.param("https://host/y.zarr", "https:// is read, and not written", id="a web server"),
        pytest.param("sftp://host/y.zarr", "sftp:// is read, and not written", id="no object store"),
        pytest.param("s3://bucket", "whole bucket|unknown format|put as a whole", id="a bucket"),
        pytest.param("s3://y.zarr", "is a whole bucket", id="a bucket of that name"),
        pytest.param("s3://me:SECRET@bucket/y.zarr", "has a user, a password or a query", id="a password"),
        pytest.param("s3://bucket/y.zarr?key=SECRET", "unknown format|a password or a query", id="a query"),
        pytest.param("s3://bucket/y[1].zarr", "for patterns", id="letters of patterns"),
        pytest.param("filecache::s3://bucket/y.zarr", "chains file systems", id="several file systems"),
        pytest.param("nosuch://bucket/y.zarr", "nosuch:// is read, and not", id="no such kind"),
    ],
)
def test_a_sink_that_is_refused(sink: str, words: str, data: Path) -> None:
    with pytest.raises(ff.InputError, match=words) as error:
        ff.predict_files(mlp(), data / "x.npy", sink)
    assert "SECRET" not in str(error.value)


def test_a_source_and_a_sink_may_not_overlap(store: str, data: Path) -> None:
    upload(data / "x.zarr", f"{store}/x.zarr")
    with pytest.raises(ff.InputError, match="are the same"):
        ff.predict_files(mlp(), f"{store}/x.zarr", f"{store}/x.zarr")


ENDINGS = ["none.npy", "none.csv", "none.parquet", "none.zarr", "none.png", "t.csv/none", "x.npy/x"]


@pytest.mark.parametrize("source", [*ENDINGS, "t.txt.npy", "t.txt.parquet", "t.txt.csv", "t.txt.png"])
@pytest.mark.parametrize("secret", ["?signature=SECRET", "?a=%2FSECRET%2B&b=SECRET"])
def test_an_error_of_a_source_has_no_secret(source: str, secret: str, data: Path, tmp_path: Path) -> None:
    for name in ("t.txt.npy", "t.txt.parquet", "t.txt.csv", "t.txt.png"):
        (tmp_path / name).write_bytes(b"\0no such format")
    options = {"preprocess": test_images.pixels} if source.endswith("png") else {}
    with web(tmp_path) as address, pytest.raises(ff.InputError) as error:
        run(address.replace("//", "//me:SECRET@") + f"/{source}{secret}", tmp_path / "out.parquet", **options)
    assert source.split("/")[0] in str(error.value)
    assert "SECRET" not in str(error.value)
    assert "SECRET" not in repr(error.value.__cause__)


def test_an_address_that_is_signed_again_resumes_and_its_signature_is_nowhere(
    data: Path, tmp_path: Path
) -> None:
    with web(data) as address:
        for number in range(2):
            summary = run(f"{address}/x.npy?signature=SECRET{number}", tmp_path / "y.npy")
    assert summary.chunks_computed == 0
    for path in (tmp_path / "y.npy.ferro-progress").iterdir():
        assert b"SECRET" not in path.read_bytes()


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
    assert error_text(OSError(text), address) == f"OSError: {wanted}"


@pytest.mark.parametrize(
    "sink", ["memory://AKIA:ab/SECRET@bucket/x.parquet", "s3://AKIA:12/SECRET@bucket/x.zarr"]
)
def test_a_sink_with_a_password_is_refused(sink: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 6), np.float32))
    with pytest.raises(ff.InputError, match="has a user, a password or a query") as error:
        ff.predict_files(mlp(), tmp_path / "x.npy", sink)
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
        files.stamp(address)
    assert type(error.value) is kind
    assert "SECRET" not in str(error.value)
    if words is None:
        assert not files.exists(address)
        return
    with pytest.raises(OSError, match=words):
        files.exists(address)


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
    with pytest.raises(ff.InputError, match=r"cannot be read|does not exist") as error:
        ff.predict_files(mlp(), source, tmp_path / "y.npy")
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
    place = SinkPath("zarr", files.resolve(sink), ("y",))
    sources = [files.resolve(source)]
    if not same:
        check_places(sources, [place], f"{sink}.ferro-progress")
        return
    with pytest.raises(ff.InputError, match="are the same"):
        check_places(sources, [place], f"{sink}.ferro-progress")


def test_a_number_sign_and_a_scheme_in_capitals_are_accepted(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 6), np.float32))
    for sink in ("memory://signs/y#1.parquet", "MEMORY://signs/y#2.parquet"):
        assert ff.predict_files(mlp(), tmp_path / "x.npy", sink).rows == 3
    assert {name.partition("/")[0] for name in objects("memory://signs")} >= {"y#1.parquet", "y#2.parquet"}
