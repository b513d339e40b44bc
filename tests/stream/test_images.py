"""`ff.run` over images: patterns and folders, preprocessing, tables with paths and arrays."""

from __future__ import annotations

import io
import os
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from dask_ferro.stream.formats.images import imagenet

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
    parts = [os.path.join(path, n) for n in sorted(os.listdir(path))]
    return pd.concat(
        [pd.read_csv(p) if p.endswith("csv") else pd.read_parquet(p) for p in parts], ignore_index=True
    )


@pytest.mark.parametrize("sink", ["out.parquet", "out.csv"])
@pytest.mark.parametrize("batch", [None, 1, 5])
@pytest.mark.parametrize("keep", [None, [], "path"])
def test_a_folder_gives_a_table_with_the_paths(
    folder: Any, tmp_path: Any, sink: str, batch: Any, keep: Any
) -> None:
    summary = ff.run(model(), folder, tmp_path / sink, preprocess=pixels, batch=batch, keep=keep)
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
    again = ff.run(model(), folder, tmp_path / sink, preprocess=pixels, batch=batch, keep=keep)
    assert again.chunks_computed == 0


def test_a_pattern_and_arrays(folder: Any, tmp_path: Any) -> None:
    ff.run(model(), str(folder / "*.png"), tmp_path / "y.npy", preprocess=pixels, output="most")
    _, x = wanted(folder, pixels)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), x[1::2].max((2, 3)))


@pytest.mark.parametrize("side", [SIDE, 224])
def test_imagenet_preprocessing_is_that_of_the_papers(folder: Any, tmp_path: Any, side: int) -> None:
    ff.run(model(side), folder, tmp_path / "out.parquet", preprocess="imagenet")
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
            {"preprocess": pixels, "keep": ["label"]}, r"keep=\['label'\].*'path' alone", id="no such column"
        ),
        pytest.param(
            {"preprocess": pixels, "sink": "y.npy", "output": "mean", "keep": []}, "keep= needs", id="keep"
        ),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_written(
    folder: Any, tmp_path: Any, options: Any, words: str
) -> None:
    options = dict(options)
    with pytest.raises(ff.ConfigError, match=words):
        ff.run(model(), folder, tmp_path / options.pop("sink", "out.parquet"), **options)
    assert os.listdir(tmp_path) == ["images"]


def test_a_file_that_is_no_image_is_named(folder: Any, tmp_path: Any) -> None:
    (folder / "image 7.png").write_bytes(b"no image")
    with pytest.raises(ff.ConfigError, match=r"rows 6 to 8 failed.*image 7.png.*cannot be read"):
        ff.run(model(), folder, tmp_path / "out.parquet", preprocess=pixels, batch=3)


def test_images_of_different_shapes_are_refused(folder: Any, tmp_path: Any) -> None:
    def ragged(image: Any) -> np.ndarray:
        return pixels(image) if image.mode != "L" else pixels(image, 16)

    with pytest.raises(ff.ConfigError, match=r"image [159].png.*one shape"):
        ff.run(model(), folder, tmp_path / "out.parquet", preprocess=ragged, batch=3)


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


@pytest.mark.parametrize("function", [remembers, Counting()])
def test_a_function_with_a_memory_finishes_and_resumes(folder: Any, tmp_path: Any, function: Any) -> None:
    for done in (3, 0):
        summary = ff.run(model(), folder, tmp_path / "out.parquet", preprocess=function, batch=4)
        assert summary.chunks_computed == done


def test_names_and_order_are_those_of_links(folder: Any, tmp_path: Any) -> None:
    (tmp_path / "links").mkdir()
    for number in range(3):
        os.symlink(
            folder / f"image {2 - number}.{'PNG' if number % 2 == 0 else 'png'}",
            tmp_path / "links" / f"{number}.png",
        )
    ff.run(model(), tmp_path / "links", tmp_path / "out.parquet", preprocess=pixels)
    got = read(tmp_path / "out.parquet")
    assert got["path"].tolist() == [str(tmp_path / "links" / f"{n}.png") for n in range(3)]
    _, x = wanted(folder, pixels)
    np.testing.assert_allclose(got.iloc[:, -3:].to_numpy(), x[2::-1].max((2, 3)))


def test_images_of_more_bits_are_refused_by_imagenet(folder: Any, tmp_path: Any) -> None:
    PIL.fromarray(np.full((64, 64), 60000, np.uint16)).save(folder / "image 0.PNG")
    with pytest.raises(ff.ConfigError, match="more than 8 bits"):
        ff.run(model(), folder, tmp_path / "out.parquet", preprocess="imagenet")


def test_an_image_is_turned_as_its_camera_was() -> None:
    upper = PIL.new("RGB", (224, 224))
    upper.paste((255, 255, 255), (0, 0, 224, 112))
    tags = upper.getexif()
    tags[0x0112] = 3  # upside down
    stored = io.BytesIO()
    upper.transpose(PIL.Transpose.ROTATE_180).save(stored, "PNG", exif=tags)
    found = imagenet(PIL.open(stored))
    assert found[:, :100].mean() > found[:, 124:].mean()
