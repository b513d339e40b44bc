"""What `tests/test_killed.py` kills: a run of pytest that holds a cluster and a browser. Not collected by itself."""

from time import sleep
from typing import Any

import distributed


def test_a_cluster_and_a_browser_are_held(cluster: distributed.LocalCluster, browser: Any) -> None:
    browser.new_page()
    print("held", flush=True)
    sleep(60)
