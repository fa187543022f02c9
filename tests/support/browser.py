"""Debian's Chromium without a screen, for tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.requirements import need_program

PATIENCE = 120
"""Seconds after which a page that does not change is taken to be broken."""


class Browser:
    """A window. `errors` are what the page's console said."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Load a page anew, and wait until it shows the place that its address names."""
        self.driver.get("about:blank")
        self.driver.get(address)
        self.wait("return document.body.dataset.ready !== undefined")

    def wait(self, script: str, *arguments: Any) -> Any:
        """Return what a script says as soon as it is true."""
        return WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: self.run(script, *arguments))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str, text: str = "") -> None:
        found = [each for each in self.driver.find_elements(By.CSS_SELECTOR, selector) if text in each.text]
        found[0].click()

    def keys(self, keys: str) -> None:
        ActionChains(self.driver).send_keys(keys).perform()

    def go(self, place: str) -> None:
        """Follow an address within the page."""
        script = """delete document.body.dataset.ready;
            if (location.hash === arguments[0]) dispatchEvent(new Event('hashchange'));
            location.hash = arguments[0]"""
        self.run(script, place)
        self.wait("return document.body.dataset.ready !== undefined")

    def place(self) -> str:
        return str(self.run("return location.hash"))

    def memory(self) -> int:
        """Return the bytes of all processes of the browser; shared ones count once."""
        found = [self.driver.service.process.pid]
        for pid in found:
            threads = Path(f"/proc/{pid}/task").glob("*/children")
            found += [int(child) for thread in threads for child in thread.read_text().split()]
        lines = [line for pid in found[1:] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def browsing(width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Browser]:
    """Start Chromium, and end it with all its processes."""
    need_program("chromium", "apt-get install chromium")
    need_program("chromedriver", "apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--force-color-profile=srgb", "--enable-precise-memory-info", f"--window-size={width},{height}"),
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def address(page: Path, place: str = "") -> str:
    return page.resolve().as_uri() + place
