"""Images as sources: a row is an image, made an array by a function in the worker that reads it.

images/*.jpg    files that a pattern matches         images/    the images in a folder, and in folders in it
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np
import xxhash

from dask_ferro.errors import InputError
from dask_ferro.lower.preparation.remote import is_address, mask
from dask_ferro.lower.signature import ValueSpec
from dask_ferro.stream import files
from dask_ferro.stream.files import Stamp, check_unchanged
from dask_ferro.stream.formats import Array, Source, check_numeric, pa, pillow
from dask_ferro.stream.formats.tables import Table

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
PATH = "path"
Preprocess = Callable[[Any], Array]
# Of ImageNet's training images, as red, green and blue between 0 and 1.
_MEAN = np.array((0.485, 0.456, 0.406), np.float32)
_DEVIATION = np.array((0.229, 0.224, 0.225), np.float32)
# To open an image and resize it, and to decode a byte of a JPEG file: 2 ms of 13 kB, 150 ms of 5 MB.
_IMAGE_S, _BYTE_S = 1.5e-3, 30e-9
# Networks are evaluated on the middle 224 of 256 pixels.
_SIDE, _RESIZE = 224, 256


def imagenet(image: Any, side: int = _SIDE) -> Array:
    """Return an image as networks that were trained on ImageNet take it: float32 of shape (3, side, side).

    The shorter side is resized to 8/7 of `side`, and the middle of it normalized by mean and deviation, with the
    roundings of torchvision's Resize and CenterCrop.
    """
    if image.mode[0] in "IF":
        raise ValueError(
            f"it has mode {image.mode}, of more than 8 bits a channel: scale it by a function of your own"
        )
    image = pillow.ImageOps.exif_transpose(image)
    # Resize truncates the longer side, and CenterCrop rounds half to even.
    shorter = max(side, round(side * _RESIZE / _SIDE))
    width, height = (
        shorter if size == min(image.size) else int(shorter * size / min(image.size)) for size in image.size
    )
    image = image.convert("RGB").resize((width, height), pillow.Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    values = np.asarray(image.crop((left, top, left + side, top + side)), np.float32) / 255
    normal = (values - _MEAN) / _DEVIATION
    return np.ascontiguousarray(normal.transpose(2, 0, 1))


@dataclass(frozen=True)
class ImageSource(Source):
    """The images of some files, each made an array by `preprocess`; `skips` the files that cannot be read."""

    grain: ClassVar[int] = 1
    label: str
    files: tuple[str, ...]
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    preprocess: Preprocess
    opened: tuple[Stamp, ...]
    skips: bool

    @property
    def rows(self) -> int:
        return len(self.files)

    @property
    def row_seconds(self) -> float:
        return _IMAGE_S + _BYTE_S * sum(stamp.size for stamp in self.opened) / len(self.opened)

    @property
    def schema(self) -> Any:
        return pa.schema([(PATH, pa.string())])

    def fingerprint(self) -> str:
        return f"{mask(self.label)}, {files.summary(files.stamps(self.files))}"

    def part(self, start: int, stop: int) -> ImageSource:
        return replace(self, files=self.files[start:stop], opened=self.opened[start:stop])

    def read(self) -> ImageRows:
        """Return the images; raises `OSError` when a file changed since it was opened."""
        found = np.empty((len(self.files), *self.row_shape), self.dtype)
        read, skipped = list[str](), list[str]()
        for file, opened in zip(self.files, self.opened, strict=True):
            try:
                made = read_image(file, self.preprocess)
            except InputError:
                if not self.skips:
                    raise
                skipped.append(mask(file))
                continue
            finally:
                # After it was read, so that a file that was replaced meanwhile is noticed.
                check_unchanged(file, opened)
            if (made.shape, made.dtype) != (self.row_shape, self.dtype):
                raise InputError(
                    f"image {file!r}: preprocess gives {made.dtype}{list(made.shape)}, and {self.dtype}"
                    f"{list(self.row_shape)} for the first image: it has to give arrays of one shape and dtype"
                )
            found[len(read)] = made
            read.append(mask(file))
        paths = pa.table({PATH: read}, self.schema)
        return ImageRows(paths, found[: len(read)], tuple(skipped))


@dataclass(frozen=True)
class ImageRows:
    """Paths and arrays of images, and the paths of those that could not be read."""

    paths: Table
    images: Array
    skipped: tuple[str, ...]

    def select(self, columns: Sequence[str]) -> Table:
        return self.paths.select(list(columns))


def open_images(path: str, preprocess: str | Preprocess | None, spec: ValueSpec, skips: bool) -> ImageSource:
    """Return the images of a folder, or those that a pattern matches, in the order of their names (2 before 10)."""
    # Before files are looked for, as it fails for every folder.
    function = _function(preprocess, spec)
    # Not real paths, since names and order are those of links.
    whole = files.resolve(path) if is_address(path) else os.path.abspath(path)
    found = tuple(files.files_of(whole, SUFFIXES))
    opened = files.stamps(found)
    if not found:
        raise InputError(f"source {whole!r}: no file matches; wanted images: {', '.join(SUFFIXES)}")
    first = _first_image(found if skips else found[:1], function)
    dtype = check_numeric(first.dtype, f"image {found[0]!r}, made an array,")
    return ImageSource(
        whole, found, first.shape, dtype, function, tuple(map(opened.__getitem__, found)), skips
    )


def _first_image(paths: Sequence[str], function: Preprocess) -> Array:
    for path in paths[:-1]:
        try:
            return read_image(path, function)
        except InputError:
            continue
    return read_image(paths[-1], function)


def read_image(file: str, preprocess: Preprocess) -> Array:
    """Return the image of a file as an array; raises `InputError` with its path where that fails."""
    open_image = pillow.Image.open
    try:
        # From the store, an image is read at once: its decoder reads small pieces.
        content = io.BytesIO(files.read(file)) if is_address(file) else file
        with open_image(content) as image:
            return np.asarray(preprocess(image))
    except Exception as error:
        raise InputError(
            f"image {file!r} cannot be read, or preprocess does not take it: {type(error).__name__}: {error}; to leave"
            ' such files out, pass unreadable="skip"'
        ) from error


def _function(preprocess: str | Preprocess | None, spec: ValueSpec) -> Preprocess:
    if callable(preprocess):
        return preprocess
    if preprocess != "imagenet":
        raise InputError(
            f"preprocess={preprocess!r}: for images, wanted 'imagenet' or a function that takes an image of Pillow and"
            f" returns an array for the input {spec}, without its rows"
        )
    side = spec.shape[-1] if spec.shape and isinstance(spec.shape[-1], int) else _SIDE
    return partial(imagenet, side=side)


# ---- what identifies a function -----------------------------------------------------------------------------


def identity(function: Any) -> str:
    """Return what identifies a function in this and in another process: its name, code, arguments and state.

    Globals that it reads are not part of it: they may change with every call.
    """
    parts = list[str]()
    _describe(function, parts, {})
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {xxhash.xxh3_64_hexdigest(' '.join(parts).encode())}"


def _describe(value: Any, parts: list[str], seen: dict[int, Any]) -> None:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        parts.append(repr(value))
    elif id(value) in seen:
        parts.append("again")
    else:
        seen[id(value)] = value
        parts.append(f"{type(value).__module__}.{type(value).__qualname__}")
        for inner in _state(value):
            _describe(inner, parts, seen)


def _state(value: Any) -> Iterable[Any]:
    """Return what tells a value from others of its class."""
    match value:
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            names = (value.__module__, value.__qualname__)
            return (*names, value.__code__, value.__defaults__, value.__kwdefaults__, cells)
        case CodeType():
            return (value.co_code, value.co_names, value.co_consts)
        case set() | frozenset():
            # Sets have another order in each process.
            return sorted(map(repr, value))
        case dict():
            return chain.from_iterable(value.items())
        case tuple() | list():
            return value
        case MethodType():
            return (value.__func__, value.__self__)
        case type() | ModuleType() | BuiltinFunctionType():
            return (getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
    # The method of a class that is written in the program changes with it.
    call = type(value).__dict__.get("__call__")
    try:
        return (call, *value.__reduce_ex__(2))
    except TypeError:
        # Locks and sessions, which have no state that could be written down.
        return (call,)
