"""Folders of images as sources: a row is an image, made an array by a function in the worker that reads it.

images/*.jpg    files that a pattern matches         images/    the images in a folder
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, ClassVar, TypeGuard

import numpy as np
from dask.utils import natural_sort_key

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import is_address, shown
from dask_ferro.lower.signature import ValueSpec
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Array, digest, missing_extra, numeric
from dask_ferro.stream.formats.parquet import Table, pyarrow_modules
from dask_ferro.stream.stores import addresses, files
from dask_ferro.stream.stores.stamps import Stamp, check_unchanged, stamps, stamps_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
PATH = "path"
Preprocess = Callable[[Any], Array]
# Of ImageNet's training images, as red, green and blue between 0 and 1.
_MEAN = np.array((0.485, 0.456, 0.406), np.float32)
_DEVIATION = np.array((0.229, 0.224, 0.225), np.float32)
# Networks are evaluated on the middle 224 of 256 pixels.
_SIDE, _RESIZED = 224, 256


def imagenet(image: Any, side: int = _SIDE) -> Array:
    """Return an image as networks that were trained on ImageNet take it: float32 of shape (3, side, side).

    The shorter side is resized to 8/7 of `side`, and the middle of it normalized by mean and deviation.
    """
    import PIL.Image
    import PIL.ImageOps

    if image.mode[0] in "IF":
        raise ValueError(
            f"it has mode {image.mode}, of more than 8 bits a channel: scale it by a function of your own"
        )
    image = PIL.ImageOps.exif_transpose(image)
    # Never smaller than the crop, which rounding could make it.
    scale = side * _RESIZED / _SIDE / min(image.size)
    width, height = (max(side, round(size * scale)) for size in image.size)
    image = image.convert("RGB").resize((width, height), PIL.Image.Resampling.BILINEAR)
    left, top = (width - side) // 2, (height - side) // 2
    values = np.asarray(image.crop((left, top, left + side, top + side)), np.float32) / 255
    normal = (values - _MEAN) / _DEVIATION
    return np.ascontiguousarray(normal.transpose(2, 0, 1))


@dataclass(frozen=True)
class ImageSource:
    """The images of some files.

    Attributes
    ----------
    path : str
        The folder, or the pattern.
    files : tuple of str
    row_shape, dtype
        Of one image, made an array.
    preprocess : callable
        Returns an image of Pillow as an array.
    opened : tuple of Stamp
        Of the files.
    token : str
        Identifies the function.
    """

    tells_content: ClassVar[bool] = True
    checks_reads: ClassVar[bool] = True
    grain: ClassVar[int] = 1
    path: str
    files: tuple[str, ...]
    row_shape: tuple[int, ...]
    dtype: np.dtype
    preprocess: Preprocess
    opened: tuple[Stamp, ...]
    token: str

    @property
    def rows(self) -> int:
        """Number of images."""
        return len(self.files)

    def fingerprint(self) -> str:
        """Return path, size and latest change of the files, and what identifies the function."""
        return f"{shown(self.path)}, {stamps_of(self.files, self.path)}, preprocess {self.token}"

    def pieces(self, chunks: Chunks) -> Callable[[int], ImagePiece]:
        """Return the images by chunk number."""
        return lambda number: self.piece(*chunks.span(number))

    def piece(self, start: int, stop: int) -> ImagePiece:
        """Return the images `start` to `stop` (excluded)."""
        return ImagePiece(
            self.files[start:stop], self.opened[start:stop], self.row_shape, self.dtype, self.preprocess
        )


@dataclass(frozen=True)
class ImagePiece:
    """The images of some files."""

    files: tuple[str, ...]
    opened: tuple[Stamp, ...]
    row_shape: tuple[int, ...]
    dtype: np.dtype
    preprocess: Preprocess

    def read(self) -> Array:
        """Return the images as one array; raises `OSError` when a file changed since it was opened."""
        found = np.empty((len(self.files), *self.row_shape), self.dtype)
        for row, (file, opened) in enumerate(zip(self.files, self.opened, strict=True)):
            made = read_image(file, self.preprocess)
            # After it was read, so that a file that was replaced meanwhile is noticed.
            check_unchanged(file, opened)
            if (made.shape, made.dtype) != (self.row_shape, self.dtype):
                raise ConfigError(
                    f"image {file!r}: preprocess gives {made.dtype}{list(made.shape)}, and {self.dtype}"
                    f"{list(self.row_shape)} for the first image: it has to give arrays of one shape and dtype"
                )
            found[row] = made
        return found


@dataclass(frozen=True)
class ImageTable:
    """The images of some files as a table: a column with the paths, and the arrays for the model's input."""

    images: ImageSource
    columns: tuple[str, ...] = (PATH,)

    @property
    def path(self) -> str:
        """The folder, or the pattern."""
        return self.images.path

    def pieces(self, chunks: Chunks) -> Callable[[int], ImageTablePiece]:
        """Return the images by chunk number."""
        return lambda number: ImageTablePiece(self.images.piece(*chunks.span(number)))


@dataclass(frozen=True)
class ImageTablePiece:
    """The images of some files, with their paths."""

    images: ImagePiece

    def read(self) -> ImageRows:
        """Return the images; raises `OSError` when a file changed since it was opened."""
        pa, _ = pyarrow_modules()
        return ImageRows(pa.table({PATH: [shown(file) for file in self.images.files]}), self.images.read())


@dataclass(frozen=True)
class ImageRows:
    """Paths and arrays of images."""

    paths: Table
    images: Array

    @property
    def num_rows(self) -> int:
        """Number of images."""
        return len(self.images)

    def select(self, columns: Sequence[str]) -> Table:
        """Return columns as a table."""
        return self.paths.select(list(columns))

    def __getitem__(self, rows: slice) -> ImageRows:
        return ImageRows(self.paths.slice(rows.start or 0, rows.stop), self.images[rows])


def is_image_path(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a value is a pattern for paths of images, one image, or a folder with images alone."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    text = addresses.address_of(os.fspath(path))
    if addresses.bare(text).lower().endswith(SUFFIXES):
        return True
    # Not asked of a store where the name tells that it is something else.
    if is_address(text) and os.path.splitext(text.rstrip("/"))[1]:
        return False
    try:
        return files.is_folder(text) and bool(_in_folder(text))
    except OSError as error:
        raise ConfigError(f"path {text!r} cannot be read: {error.strerror or error}") from error


def open_images(path: str, preprocess: str | Preprocess | None, spec: ValueSpec) -> ImageSource:
    """Return the images of a folder, or those that a pattern matches, in the order of their names (2 before 10).

    Parameters
    ----------
    path : str
    preprocess : "imagenet", callable or None
        Returns an image of Pillow as an array.
    spec : ValueSpec
        The model's input.

    Raises
    ------
    ConfigError
        No image is there, the first one cannot be read, or no function is given.
    """
    # Before files are looked for, as it fails for every folder.
    function = _function(preprocess, spec)
    # Not real paths, since names and order are those of links.
    whole = addresses.address_of(path.rstrip("/")) if is_address(path) else os.path.abspath(path)
    found = tuple(sorted(_matching(whole), key=natural_sort_key))
    if not found:
        raise ConfigError(f"source {whole!r}: no file matches; wanted images: {', '.join(SUFFIXES)}")
    try:
        opened = stamps(found)
    except OSError as error:
        raise ConfigError(f"source {whole!r} cannot be read: {error.strerror or error}") from error
    first = read_image(found[0], function)
    dtype = numeric(first.dtype, f"image {found[0]!r}, made an array,")
    return ImageSource(whole, found, first.shape, dtype, function, opened, _token(function))


def _matching(path: str) -> list[str]:
    # A path of a file may have brackets, which would be a pattern.
    if is_address(path) and not files.is_pattern(path):
        return _in_folder(path) if files.is_folder(path) else [path]
    if os.path.isfile(path):
        return [path]
    return _in_folder(path) if os.path.isdir(path) else files.matching(path)


def read_image(file: str, preprocess: Preprocess) -> Array:
    """Return the image of a file as an array; raises `ConfigError` with its path where that fails."""
    try:
        # Imported on use: it is an extra.
        import PIL.Image
    except ImportError as error:
        raise missing_extra("Pillow", error) from error
    try:
        # From the store, an image is read at once: its decoder reads small pieces.
        content = io.BytesIO(files.read(file)) if is_address(file) else file
        with PIL.Image.open(content) as image:
            return np.asarray(preprocess(image))
    except Exception as error:
        raise ConfigError(
            f"image {file!r} cannot be read, or preprocess does not take it: {type(error).__name__}: {error}"
        ) from error


def _token(function: Preprocess) -> str:
    """Return what identifies a function in this and in another process: its names, and the code that it has.

    What else it depends on, such as globals, is not part of it: they may change with every call.
    """
    inner, fixed = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    name = f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    code = getattr(inner, "__code__", None)
    text = f"{sorted(fixed.items())}" if code is None else f"{sorted(fixed.items())} {_code(code)}"
    return f"{name} {digest(text.encode())[:12]}"


def _code(code: CodeType) -> str:
    # Sets have another order in each process.
    constants = [
        _code(c) if isinstance(c, CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _in_folder(path: str) -> list[str]:
    if is_address(path):
        names = addresses.names_in(path)
        return [
            addresses.joined(path, name)
            for name, found in names.items()
            if name.lower().endswith(SUFFIXES) and not found.is_folder
        ]
    return [
        entry.path for entry in os.scandir(path) if entry.name.lower().endswith(SUFFIXES) and entry.is_file()
    ]


def _function(preprocess: str | Preprocess | None, spec: ValueSpec) -> Preprocess:
    if callable(preprocess):
        return preprocess
    if preprocess != "imagenet":
        raise ConfigError(
            f"preprocess={preprocess!r}: for images, wanted 'imagenet' or a function that takes an image of Pillow and"
            f" returns an array for the input {spec}, without its rows"
        )
    side = spec.shape[-1] if spec.shape and isinstance(spec.shape[-1], int) else _SIDE
    return partial(imagenet, side=side)
