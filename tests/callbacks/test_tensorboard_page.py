"""The page of `tensorboard --logdir` for a run, in a real browser: charts by group, pictures, texts, and the table of
runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_ptm.callbacks import (
    GradNormMonitor,
    HyperParameters,
    MemoryTimeline,
    PageMonitor,
    PageTracer,
    PlanPrinter,
    Throughput,
)
from lightning_ptm.callbacks.memory_timeline import HEIGHT, TITLE, WIDTH

WAIT_S = 15
REQUIRED = "LIGHTNING_PTM_TESTS_NEED_BROWSER"
"""Set where the browser must be there, so that these tests cannot be skipped without anybody noticing."""

# TensorBoard's older pages are made of nested shadow roots, into which no selector reaches.
ALL_TEXT = """
const texts = [];
(function walk(node) {
  if (node.nodeType === Node.TEXT_NODE) texts.push(node.textContent.trim());
  if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.nodeName)) return;
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
})(document.body);
return texts.filter(text => text).join('\\n');
"""


CLICK_GROUP = """
document.querySelector(`metrics-card-groups .group-title[title="${arguments[0]}"]`).closest('button').click();
"""

CHARTS = """
return [...document.querySelectorAll('metrics-card-groups scalar-card')].map(card => [
  card.querySelector('.tag').title,
  [...card.querySelectorAll('tb-data-table-content-cell')].map(cell => cell.textContent.trim()).join(' | '),
]);
"""

PICTURE = """
const image = document.querySelector('metrics-card-groups image-card img');
return image && image.naturalWidth ? [image.naturalWidth, image.naturalHeight] : null;
"""

OPEN_AT_FIRST = 2
"""Groups that TensorBoard opens by itself."""

VALUES = re.compile(r"a_run.*\d")

CHARTS_WANTED = {
    "gradients/norm",
    "links/disk_to_host_MB_per_step",
    "links/host_to_device_GB_per_s",
    "loss",
    "memory/device_MB",
    "memory/host_MB",
    "memory/disk_MB",
    "speed/samples_per_s",
    "speed/tokens_per_s",
    "stall/fetch_s_per_step",
    "update/arithmetic_s_per_step",
    "update/staleness_mean",
}


def _lack(what: str) -> NoReturn:
    if os.environ.get(REQUIRED):
        pytest.fail(f"{what} is missing, and {REQUIRED} is set")
    pytest.skip(f"{what} is missing: apt-get install chromium chromium-driver; pip install selenium")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A window that is high enough for a group of charts: TensorBoard loads what can be seen."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        _lack("chromium" if chromium is None else "chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        _lack("selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = str(chromium)
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1600,3000"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--user-data-dir={tmp_path / 'chromium'}")
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(driver)))
    try:
        yield window
    finally:
        window.quit()


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read this folder."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port=0", "--host=127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = next((found for line in server.stderr if (found := re.search(r"http://[^:]+:\d+", line))), None)
            assert said is not None, "TensorBoard has ended"
            yield said[0]
        finally:
            server.terminate()


def wait_for(browser: Any, found: Callable[[Any], Any], what: str) -> Any:
    """Waits until `found` returns something, and returns it."""
    from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, WAIT_S, poll_frequency=0.1, ignored_exceptions=[StaleElementReferenceException])
    try:
        return wait.until(found)
    except TimeoutException as error:
        raise TimeoutError(what) from error


def show(browser: Any, address: str, page: str) -> None:
    browser.get("about:blank")  # another page of the same address would not be loaded anew
    browser.get(f"{address}/#{page}")


def text_with(browser: Any, *words: str) -> str:
    """The page's text, once it has all these words."""

    def found(page: Any) -> str:
        text = str(page.execute_script(ALL_TEXT))
        return text if all(word in text for word in words) else ""

    return str(wait_for(browser, found, f"not all of {words} are in the page"))


def charts(browser: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Each group of charts, while it alone is open: its name, and title and values of each of its charts."""
    wait_for(browser, lambda page: page.find_elements("css selector", "metrics-card-groups scalar-card"), "charts")
    groups = [each.text for each in browser.find_elements("css selector", "metrics-card-groups .group-title")]
    for group in groups[:OPEN_AT_FIRST]:
        browser.execute_script(CLICK_GROUP, group)

    def all_values(page: Any) -> dict[str, str]:
        found = dict(page.execute_script(CHARTS))
        return found if found and all(VALUES.search(values) for values in found.values()) else {}

    for group in groups:
        browser.execute_script(CLICK_GROUP, group)
        try:
            yield group, wait_for(browser, all_values, f"charts of {group} with values")
        except TimeoutError as error:
            raise AssertionError(f"{error}: {browser.execute_script(CHARTS)}") from None
        browser.execute_script(CLICK_GROUP, group)


@pytest.mark.browser
def test_a_run_in_the_browser(strategy_at, board_trainer, model, data, browser, tmp_path: Path) -> None:
    model.save_hyperparameters({"depth": 3, "activation": "gelu"})
    callbacks = [PageMonitor(), MemoryTimeline(), PageTracer(), GradNormMonitor(), HyperParameters(), Throughput()]
    strategy = strategy_at("three_tiers", lock_free={"max_staleness": 1})
    logger = TensorBoardLogger(tmp_path / "logs", name="a_run", version="", default_hp_metric=False)
    trainer = board_trainer(strategy, [PlanPrinter(show=False), *callbacks], logger=logger)
    trainer.fit(model, data, data)
    loss = f"{float(trainer.callback_metrics['loss']):.4g}"

    with tensorboard(tmp_path / "logs") as address:
        show(browser, address, "timeseries")
        shown: dict[str, str] = {}
        for group, found in charts(browser):
            assert all(tag == group or tag.startswith(f"{group}/") for tag in found)
            shown |= found
            if group == "memory":
                size = wait_for(browser, lambda page: page.execute_script(PICTURE), "a picture")
                assert size == [WIDTH, 3 * HEIGHT + TITLE]
        assert shown.keys() >= CHARTS_WANTED
        assert loss in shown["loss"]

        show(browser, address, "text")
        text_with(browser, "pages/plan", "pages/states", "pages/settings", "pages/trace")
        text_with(browser, "fetch blocks.0", "release blocks.2", "root", "MB in use", "max_staleness", "cpu_time, s")

        show(browser, address, "hparams")
        text = text_with(browser, "strategy/page_size", "activation", "gelu", "depth", "a_run", "speed/tokens_per_s")
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", text)]
        value = float(trainer.callback_metrics["loss"])
        assert any(abs(number - value) < 1e-3 * value for number in numbers), "the metric's last value is beside them"
