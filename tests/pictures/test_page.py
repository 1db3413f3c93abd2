"""The web page: its data, and that it needs nothing else and runs no foreign text."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from esm_turbo.pictures.logo import logo_sheet
from esm_turbo.pictures.page import page
from esm_turbo.pictures.panels import Table
from esm_turbo.pictures.ranking import ranking_sheet
from esm_turbo.pictures.variant_map import variant_sheet
from tests.pictures.conftest import ODD


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.elements[-1][2].append(data)

    def tags(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found, _ in self.elements if name == tag]

    def texts(self, tag: str, **attributes: str) -> list[str]:
        return ["".join(text) for t, found, text in self.elements if t == tag and attributes.items() <= found.items()]


@pytest.fixture
def parsed(variants, ranking, designs) -> Parsed:
    sheets = [variant_sheet(variants, "m"), ranking_sheet(ranking, "m"), logo_sheet(designs, "ACDEFGHI", "m")]
    return Parsed(page(sheets))


def test_figures_and_tables_hold_the_data(parsed, variants) -> None:
    data = [json.loads(text) for text in parsed.texts("script", type="application/json")]
    figures, tables = [one for one in data if isinstance(one, list)], [one for one in data if isinstance(one, dict)]
    assert [len(one) for one in figures] == [4 + 2, 4, 4] and len(tables) == len(parsed.tags("svg")) == 3
    assert tables[0]["position"] == "position"
    assert [row[1] for row in tables[0]["rows"]] == [one.variant for one in variants.variants]
    assert [row[5] for row in tables[0]["rows"]] == variants.scores["turbo"].values
    assert parsed.texts("h1")[0].startswith(ODD)
    # A spreadsheet would run what begins with an equals sign.
    assert tables[0]["rows"][0][0] == ODD


def test_a_browser_rounds_no_number(variants) -> None:
    sheet = replace(
        variant_sheet(variants, "m"), table=Table(["seed"], [[2**53], [2**53 + 1], [-(2**64)], [0.1], [None]])
    )
    table = json.loads(Parsed(page([sheet])).texts("script", type="application/json")[1])
    assert table["rows"] == [[2**53], [str(2**53 + 1)], [str(-(2**64))], [0.1], [None]]


def test_nothing_is_loaded_from_elsewhere(parsed) -> None:
    loading = {"src", "href", "action", "data", "poster", "srcset"}
    links = [value for _, found, _ in parsed.elements for name, value in found.items() if name in loading]
    assert links == ["#sheet1", "#sheet2", "#sheet3"]
    drawn = [found["xlink:href"] or "" for _, found, _ in parsed.elements if "xlink:href" in found]
    assert drawn and all(link.startswith(("#", "data:image/png;base64,")) for link in drawn)
    assert not [tag for tag, _, _ in parsed.elements if tag in ("iframe", "object", "embed", "base", "b", "link")]
    for style in parsed.texts("style"):
        assert not re.search(r"url\(|@import", style)
    own = parsed.texts("script")[-1]
    assert "setUpTable" in own and not re.search(r"https?://|fetch\(|XMLHttpRequest", own)


def test_one_sheet_needs_no_index(variants) -> None:
    assert not Parsed(page([variant_sheet(variants, "m")])).texts("nav")


@pytest.mark.browser
def test_the_page_searches_sorts_and_loads_nothing_in_a_browser(variants, tmp_path) -> None:
    """Opened from a file, as after an e-mail (`make test-browser`)."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    path = tmp_path / "map.html"
    path.write_text(page([variant_sheet(variants, "m")]), encoding="utf-8")
    options = webdriver.ChromeOptions()
    driver_path, options.binary_location = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver_path and options.binary_location, "install chromium and its driver"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1400"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.get(path.as_uri())
        wait = WebDriverWait(driver, 60)
        wait.until(lambda _: driver.find_elements("css selector", ".figure svg image"))
        assert len(driver.find_elements("css selector", "tbody tr")) == len(variants.variants)
        driver.find_element("css selector", "input").send_keys("30")
        wait.until(lambda _: len(driver.find_elements("css selector", "tbody tr")) == 19)
        assert driver.find_element("css selector", ".mark").is_displayed()
        header = driver.find_elements("css selector", "th")[5]
        header.click()
        scores = [float(cell.text) for cell in driver.find_elements("css selector", "tbody td:nth-child(6)")]
        assert scores == sorted(scores) and header.get_attribute("aria-sort") == "ascending"
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
        events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        loaded = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert [url for url in loaded if not url.startswith(("file:", "data:", "blob:"))] == []
    finally:
        driver.quit()
