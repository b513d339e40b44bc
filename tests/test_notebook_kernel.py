"""Cells in a real kernel: a model is HTML, and progress is one output, however often it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.graphs import mlp

nbclient = pytest.importorskip("nbclient", reason="cells are run by nbclient, which is not installed")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="the kernel is ipykernel, which is not installed")

CELLS = {
    "model": 'import dask_ferro as ff\nmodel = ff.from_onnx("m.onnx")\nmodel',
    "run": 'ff.predict_files(model, "x.npy", "y.npy", batch_size=4).rows',
    "quiet": 'ff.predict_files(model, "x.npy", "z.npy", batch_size=4, progress=False).rows',
    "names": "print(*dir(ff))",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Run all cells in one kernel, and return the outputs of each."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    (folder / "m.onnx").write_bytes(mlp().SerializeToString())
    np.save(folder / "x.npy", np.zeros((400, 6), np.float32))
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def _shown(outputs: list[Any]) -> list[str]:
    return [one.data["text/plain"] for one in outputs if one.output_type == "display_data"]


def test_a_model_is_html_with_its_text_beside_it(outputs):
    (one,) = outputs["model"]
    assert "Model" in one.data["text/html"]
    assert "<svg" in one.data["text/html"]
    assert one.data["text/plain"].startswith("<")


def test_the_line_of_a_run_is_one_output_that_is_updated(outputs):
    (line,) = _shown(outputs["run"])
    assert line.startswith("rows 400 / 400 rows  ")
    assert outputs["run"][-1].data["text/plain"] == "400"


def test_no_line_where_none_is_wanted(outputs):
    assert _shown(outputs["quiet"]) == []


def test_nothing_is_written_beside_the_line(outputs):
    assert [one for one in outputs["run"] if one.output_type == "stream"] == []


def test_names_are_the_public_ones(outputs):
    import dask_ferro as ff

    (printed,) = outputs["names"]
    assert printed.text.split() == sorted(ff.__all__)
