"""Take the pictures of pages and cards: `python docs/drawings/take.py [FOLDER]` writes PNG files, by default here.

Chromium opens the pages of a real cluster, which starts with its work; that takes half a minute.  The packages are
those of the extra `dev`, and Chromium is the system's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from dask.distributed import Client, wait
from playwright.sync_api import Page, sync_playwright

import dask_ferro as ff

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from tests import needs  # noqa: E402

# Pixels; in a narrower window, Dask's navigation bar has two lines and covers ours.
WIDTH = 1100
# The style of a notebook's tables.
NOTEBOOK = "body { font: 13px system-ui, sans-serif; margin: 12px } td, th { padding: 3px 9px }"
DRAWN = "() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"


def take(page: Page, folder: Path, name: str, height: int) -> None:
    """Write the upper part of a page."""
    clip: Any = {"x": 0, "y": 0, "width": WIDTH, "height": height}
    page.screenshot(path=folder / f"{name}.png", clip=clip)


def open_page(page: Page, address: str, name: str) -> None:
    """Open a page of the dashboard, and wait until it is drawn."""
    page.goto(f"{address}/ferro-{name}")
    page.wait_for_function(DRAWN)
    page.wait_for_timeout(1500)


def compute(rows: bytes, seconds: float) -> bytes:
    """Wait like a task that computes."""
    time.sleep(seconds)
    return rows


def submit(client: Client) -> list[Any]:
    """Submit rounds of uneven tasks; each round reads a result of the round before."""
    futures = [client.submit(bytes, 1000, key="read-table")]
    for number in range(5):
        rows = futures[-1]
        futures += [
            client.submit(compute, rows, 0.05 + 0.03 * (i % 9), key=f"score-{number}-{i}") for i in range(60)
        ]
    return futures


def main(folder: Path = FOLDER) -> None:
    """Take all pictures."""
    options = {"n_workers": 0, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with (
        ff.LocalCluster(**options) as cluster,
        Client(cluster) as client,
        sync_playwright() as playwright,
    ):
        chromium = playwright.chromium.launch(executable_path=needs.chromium(), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": WIDTH, "height": 700})
        address = cluster.dashboard_link.rsplit("/", 1)[0]
        cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=4)
        open_page(page, address, "stealing")
        futures = submit(client)
        wait(futures[:200])
        page.wait_for_timeout(500)
        take(page, folder, "page-stealing", 645)
        open_page(page, address, "elastic")
        take(page, folder, "page-elastic", 570)
        # One task that no worker may run, and one that may run on a busy worker only.
        last = max(client.scheduler_info()["workers"])
        long = client.submit(compute, b"", 20, key="train-epoch", workers=[last])
        bound = client.submit(compute, b"", 1, key="score-17", workers=[last])
        stuck = client.submit(compute, b"", 1, key="render-3", resources={"GPU": 1})
        wait(futures)
        open_page(page, address, "overview")
        page.wait_for_timeout(4000)
        take(page, folder, "page-overview", 420)
        client.cancel([long, bound, stuck])
        model = ff.from_onnx(ROOT / "examples" / "models" / "digits_conv.onnx", granularity="op")
        page.set_content(f"<style>{NOTEBOOK}</style>{model._repr_html_()}")
        take(page, folder, "card-model", 330)
        chromium.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
