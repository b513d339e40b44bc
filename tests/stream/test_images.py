"""`ff.predict_files` over images: patterns and folders, preprocessing, tables with paths and arrays."""

from __future__ import annotations

import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from dask_ferro.stream.formats.images import identity, imagenet
from tests.programs import ran

pd = pytest.importorskip("pandas")
PIL = pytest.importorskip("PIL.Image")

COUNT, SIDE = 12, 32


def model(side: int = SIDE) -> onnx.ModelProto:
    """The mean and the maximum of each channel of an image."""
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
            helper.make_node("ReduceMax", ["x", "axes"], ["most"], keepdims=0),
        ],
        "colours",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, side, side])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in ("mean", "most")],
        [onnx.numpy_helper.from_array(np.int64([2, 3]), "axes")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def pixels(image: Any, side: int = SIDE) -> np.ndarray:
    """The left upper corner of an image, as float32 of shape (3, side, side)."""
    values = np.asarray(image.convert("RGB"), np.float32)[:side, :side]
    return np.ascontiguousarray(values.transpose(2, 0, 1))


@pytest.fixture
def folder(tmp_path: Any) -> Any:
    """Images of several sizes, modes and formats, whose names sort as numbers, and a file that is none."""
    where = tmp_path / "images"
    where.mkdir()
    rng = np.random.default_rng(0)
    for k in range(COUNT):
        values = rng.integers(0, 255, (40 + k, 64, 3), np.uint8)
        mode = ("RGB", "L", "RGBA", "P")[k % 4]
        PIL.fromarray(values).convert(mode).save(where / f"image {k}.{'png' if k % 2 else 'PNG'}")
    (where / "notes.txt").write_text("no image")
    return where


def wanted(folder: Any, preprocess: Any) -> tuple[list[str], np.ndarray]:
    paths = [str(folder / f"image {k}.{'png' if k % 2 else 'PNG'}") for k in range(COUNT)]
    return paths, np.stack([preprocess(PIL.open(path)) for path in paths])


def read(path: Any) -> Any:
    return pd.read_csv(path) if str(path).endswith("csv") else pd.read_parquet(path)


@pytest.mark.parametrize("sink", ["out.parquet", "out.csv"])
@pytest.mark.parametrize("batch", [None, 1, 5])
@pytest.mark.parametrize("keep", [None, [], "path"])
def test_a_folder_gives_a_table_with_the_paths(
    folder: Any, tmp_path: Any, sink: str, batch: Any, keep: Any
) -> None:
    summary = ff.predict_files(
        model(), folder, tmp_path / sink, preprocess=pixels, batch_size=batch, passthrough=keep
    )
    assert summary.rows == COUNT
    paths, x = wanted(folder, pixels)
    got = read(tmp_path / sink)
    assert list(got.columns) == [
        *([] if keep == [] else ["path"]),
        *(f"mean_{k}" for k in range(3)),
        *(f"most_{k}" for k in range(3)),
    ]
    if keep != []:
        assert got["path"].tolist() == paths
    np.testing.assert_allclose(got.iloc[:, -3:].to_numpy(), x.max((2, 3)), rtol=1e-5)
    np.testing.assert_allclose(got.iloc[:, -6:-3].to_numpy(), x.mean((2, 3)), rtol=1e-4)
    again = ff.predict_files(
        model(), folder, tmp_path / sink, preprocess=pixels, batch_size=batch, passthrough=keep
    )
    assert again.chunks_computed == 0


def test_a_pattern_and_arrays(folder: Any, tmp_path: Any) -> None:
    most = ff.from_onnx(model(), outputs="most")
    ff.predict_files(most, str(folder / "*.png"), tmp_path / "y.npy", preprocess=pixels)
    _, x = wanted(folder, pixels)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), x[1::2].max((2, 3)))


@pytest.mark.parametrize("side", [SIDE, 224])
def test_imagenet_preprocessing_is_that_of_the_papers(folder: Any, tmp_path: Any, side: int) -> None:
    ff.predict_files(model(side), folder, tmp_path / "out.parquet", preprocess="imagenet")
    _, x = wanted(folder, partial(imagenet, side=side))
    assert x.shape == (COUNT, 3, side, side)
    np.testing.assert_allclose(
        read(tmp_path / "out.parquet").iloc[:, -3:].to_numpy(), x.max((2, 3)), rtol=1e-5
    )


def wrong_dtype(image: Any) -> np.ndarray:
    return pixels(image).astype(np.float64)


def as_it_is(image: Any) -> np.ndarray:
    return np.asarray(image.convert("RGB"), np.float32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({}, "preprocess=None.*wanted 'imagenet' or a function", id="no function"),
        pytest.param({"preprocess": "vgg"}, "preprocess='vgg'.*wanted 'imagenet'", id="another name"),
        pytest.param({"preprocess": wrong_dtype}, "float64, wanted float32", id="another dtype"),
        pytest.param({"preprocess": as_it_is}, "on axis 1, wanted 3", id="another shape"),
        pytest.param(
            {"preprocess": pixels, "passthrough": ["label"]},
            r"passthrough=\['label'\].*only the column 'path'",
            id="no such column",
        ),
        pytest.param(
            {"preprocess": pixels, "sink": "y", "passthrough": []},
            "passthrough= writes a table",
            id="keep",
        ),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_written(
    folder: Any, tmp_path: Any, options: Any, words: str
) -> None:
    options = dict(options)
    with pytest.raises(ff.InputError, match=words):
        ff.predict_files(model(), folder, tmp_path / options.pop("sink", "out.parquet"), **options)
    assert os.listdir(tmp_path) == ["images"]


def test_a_file_that_is_no_image_is_named(folder: Any, tmp_path: Any) -> None:
    (folder / "image 7.png").write_bytes(b"no image")
    with pytest.raises(ff.InputError, match=r"rows 6 to 8 failed.*image 7.png.*cannot be read"):
        ff.predict_files(model(), folder, tmp_path / "out.parquet", preprocess=pixels, batch_size=3)


def test_images_of_different_shapes_are_refused(folder: Any, tmp_path: Any) -> None:
    def ragged(image: Any) -> np.ndarray:
        return pixels(image) if image.mode != "L" else pixels(image, 16)

    with pytest.raises(ff.InputError, match=r"image [159].png.*one shape"):
        ff.predict_files(model(), folder, tmp_path / "out.parquet", preprocess=ragged, batch_size=3)


# ---- what a reader of the code found ------------------------------------------------------------------------

SEEN: list[int] = []


def remembers(image: Any) -> np.ndarray:
    SEEN.append(1)
    assert image.mode in {"RGB", "L", "RGBA", "P"}
    return pixels(image)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, image: Any) -> np.ndarray:
        self.calls += 1
        return pixels(image)


def test_a_function_with_a_memory_finishes_and_resumes(folder: Any, tmp_path: Any) -> None:
    for done in (3, 0):
        summary = ff.predict_files(
            model(), folder, tmp_path / "out.parquet", preprocess=remembers, batch_size=4
        )
        assert summary.chunks_computed == done


def test_an_object_that_changes_finishes_and_is_another_run(folder: Any, tmp_path: Any) -> None:
    function, sink = Counting(), tmp_path / "out.parquet"
    assert ff.predict_files(model(), folder, sink, preprocess=function).rows == COUNT
    with pytest.raises(
        ff.InputError, match=r"is of another run: call ff.predict_files.*preprocess \(was Counting"
    ):
        ff.predict_files(model(), folder, sink, preprocess=function)


def scaled(scale: float, image: Any) -> np.ndarray:
    return pixels(image) * np.float32(scale)


def closure(scale: float) -> Any:
    return lambda image: pixels(image) * np.float32(scale)


def default(value: float) -> Any:
    def made(image: Any, scale: float = value) -> np.ndarray:
        return pixels(image) * np.float32(scale)

    return made


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale, self.table = scale, {"a": np.full(3, scale), "b": {1, 2}}

    def __call__(self, image: Any) -> np.ndarray:
        return pixels(image) * np.float32(self.scale)

    def method(self, image: Any) -> np.ndarray:
        return self(image)


FUNCTIONS = {
    "an argument of a partial": lambda scale: partial(scaled, scale),
    "a keyword of a partial": lambda scale: partial(pixels, side=int(scale)),
    "a closure": closure,
    "a default": default,
    "an object": Scaled,
    "a method": lambda scale: Scaled(scale).method,
    "a function in an object": lambda scale: partial(map, closure(scale)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_its_code_arguments_and_state(name: str) -> None:
    make = FUNCTIONS[name]
    assert identity(make(1.0)) == identity(make(1.0)) != identity(make(2.0))


def test_a_function_is_the_same_in_another_process() -> None:
    code = "from tests.stream.test_images import *; print(*(identity(m(1.0)) for m in FUNCTIONS.values()), sep='\\n')"
    run = ran([sys.executable, "-c", code], env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert run.stdout.splitlines() == [identity(make(1.0)) for make in FUNCTIONS.values()], run.stderr


@pytest.mark.parametrize("sink", ["out.parquet", "out.csv"])
def test_images_that_cannot_be_read_are_skipped_and_named(folder: Any, tmp_path: Any, sink: str) -> None:
    for number in (0, 3, 4, 5):
        next(folder.glob(f"image {number}.*")).write_bytes(b"no image")
    bad = [str(next(folder.glob(f"image {number}.*"))) for number in (0, 3, 4, 5)]
    call = partial(
        ff.predict_files, model(), folder, tmp_path / sink, preprocess=pixels, batch_size=2, unreadable="skip"
    )
    summary = call()
    assert (summary.rows, list(summary.skipped)) == (COUNT - 4, bad)
    assert "4 files skipped" in str(summary)
    assert sorted([*read(tmp_path / sink)["path"], *bad]) == sorted(wanted_paths(folder))
    assert (call().skipped, call().chunks_computed) == (summary.skipped, 0)
    with pytest.raises(ff.InputError, match="needs a table as sink"):
        ff.predict_files(model(), folder, tmp_path / "y", preprocess=pixels, unreadable="skip")


def wanted_paths(folder: Any) -> list[str]:
    return [str(path) for path in folder.iterdir() if path.suffix.lower() == ".png"]


@pytest.mark.parametrize(("padding", "chunks"), [(0, 6), (130_000, 20)])
def test_images_of_more_bytes_are_more_chunks(
    folder: Any, tmp_path: Any, monkeypatch: Any, padding: int, chunks: int
) -> None:
    # All threads get equally many chunks.
    monkeypatch.setattr("dask_ferro.stream.pools.CPU_COUNT", 2)
    content = (folder / "image 1.png").read_bytes()
    (tmp_path / "padded.png").write_bytes(content + bytes(padding))
    for k in range(COUNT, 200):
        os.link(tmp_path / "padded.png", folder / f"image {k}.png")
    summary = ff.predict_files(model(), folder, tmp_path / "out.parquet", preprocess=pixels)
    assert summary.chunks_computed == chunks


def test_images_in_folders_of_a_folder_are_read(folder: Any, tmp_path: Any) -> None:
    os.makedirs(folder / "class b" / ".ipynb_checkpoints")
    for name in ("class b/1.png", "class b/.2.png", "class b/.ipynb_checkpoints/3.png"):
        os.link(folder / "image 1.png", folder / name)
    assert ff.predict_files(model(), folder, tmp_path / "out.parquet", preprocess=pixels).rows == COUNT + 1
    assert read(tmp_path / "out.parquet")["path"][0] == str(folder / "class b" / "1.png")


def test_names_and_order_are_those_of_links(folder: Any, tmp_path: Any) -> None:
    (tmp_path / "links").mkdir()
    for number in range(3):
        os.symlink(
            folder / f"image {2 - number}.{'PNG' if number % 2 == 0 else 'png'}",
            tmp_path / "links" / f"{number}.png",
        )
    ff.predict_files(model(), tmp_path / "links", tmp_path / "out.parquet", preprocess=pixels)
    got = read(tmp_path / "out.parquet")
    assert got["path"].tolist() == [str(tmp_path / "links" / f"{n}.png") for n in range(3)]
    _, x = wanted(folder, pixels)
    np.testing.assert_allclose(got.iloc[:, -3:].to_numpy(), x[2::-1].max((2, 3)))


def test_images_of_more_bits_are_refused_by_imagenet(folder: Any, tmp_path: Any) -> None:
    PIL.fromarray(np.full((64, 64), 60000, np.uint16)).save(folder / "image 0.PNG")
    with pytest.raises(ff.InputError, match="more than 8 bits"):
        ff.predict_files(model(), folder, tmp_path / "out.parquet", preprocess="imagenet")


def test_an_image_is_turned_as_its_camera_was() -> None:
    upper = PIL.new("RGB", (224, 224))
    upper.paste((255, 255, 255), (0, 0, 224, 112))
    tags = upper.getexif()
    tags[0x0112] = 3  # upside down
    stored = io.BytesIO()
    upper.transpose(PIL.Transpose.ROTATE_180).save(stored, "PNG", exif=tags)
    found = imagenet(PIL.open(stored))
    assert found[:, :100].mean() > found[:, 124:].mean()
