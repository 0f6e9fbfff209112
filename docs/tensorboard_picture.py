"""Draws images/tensorboard.png: TensorBoard's page of a run, in a headless chromium.

    python docs/tensorboard_picture.py runs    # after the run of callbacks.md, "The README's pictures"

Needs `apt-get install chromium chromium-driver`, selenium and tensorboard.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from selenium import webdriver

TARGET = Path(__file__).resolve().parent / "images" / "tensorboard.png"
FILTER = "train_loss|tokens_per_s|disk_to_host_MB|host_to_disk_MB|stall/(update|fetch)_s"
SETTINGS = {
    "scalarSmoothing": 0,
    "timeSeriesCardMinWidth": 380,
    "timeSeriesSettingsPaneOpened": False,
    "ignoreOutliers": False,
    "sideBarWidthInPercent": 12,
}
"""Settings of TensorBoard's page that show unsmoothed values, in cards wide enough for whole titles."""


def main(folder: str, target: Path = TARGET, page: str = f"/?tagFilter={FILTER}#timeseries") -> None:
    """Opens a page of a TensorBoard of `folder`, and saves what the window shows."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port=0", "--host=127.0.0.1"]
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1500,1170", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    service = webdriver.ChromeService("/usr/bin/chromedriver")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        window = webdriver.Chrome(options=options, service=service)
        try:
            assert server.stderr is not None
            found = next(filter(None, (re.search(r"http://[^:]+:\d+", line) for line in server.stderr)))
            window.get(found[0])
            window.execute_script(
                "localStorage.setItem('_tb_global_settings', arguments[0]);"
                "localStorage.setItem('_tb_global_settings.timeseries', arguments[0]);",
                json.dumps(SETTINGS),
            )
            window.get(f"{found[0]}{page}")
            time.sleep(15)  # charts are drawn when their values have come
            window.save_screenshot(str(target))
        finally:
            window.quit()
            server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:2])
