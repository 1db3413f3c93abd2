"""The page, used as by a person: a real headless Chromium against a running service (`make test-browser`)."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time

import numpy as np
import pytest

from esm_turbo import TurboEsm
from esm_turbo.pictures.palettes import RESIDUE_ORDER
from esm_turbo.serve.limits import Limits
from tests.helpers.models import E1_MINI
from tests.helpers.service import running

pytestmark = pytest.mark.browser

TOKEN = "a-token-of-the-test"
# The colour of a canvas at a place in CSS pixels.
PIXEL = """
const [canvas, x, y] = arguments, ratio = canvas.width / canvas.clientWidth;
return [...canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    # By name, or Selenium asks a server of its own where they are.
    driver_path, options.binary_location = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver_path and options.binary_location, "install chromium and its driver"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1400"):
        options.add_argument(argument)
    downloads = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    driver.downloads = downloads
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def client(turbo, tmp_path_factory):
    with running(turbo, tmp_path_factory.mktemp("served") / "store", Limits(residues=300)) as client:
        yield client


@pytest.fixture
def page(browser, client):
    errors(browser)
    browser.get(f"http://127.0.0.1:{client.port}/")
    wait(lambda: "esm2-mini" in browser.find_element("id", "service").text)
    yield browser
    # Everything came from the service, and nothing went wrong on the way.
    requested = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert requested
    own = (f"http://127.0.0.1:{client.port}/", f"blob:http://127.0.0.1:{client.port}/", "data:")
    assert [url for url in requested if not url.startswith(own)] == []


def wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)
    return found


def errors(browser):
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def downloaded(browser, name):
    path = browser.downloads / name
    wait(path.is_file, 20)
    return path


def test_a_protein_becomes_a_variant_map(page, turbo):
    page.find_element("id", "example-variants").click()
    page.find_element("id", "first").clear()
    page.find_element("id", "first").send_keys("5")
    page.find_element("id", "run-variants").click()
    wait(lambda: page.find_element("id", "result-variants").is_displayed())
    protein = page.find_element("id", "protein").get_attribute("value")
    expected = turbo.score_variants(protein, first_position=5)
    assert (
        f"{len(expected.scores):,} substitutions of {len(protein)} residues"
        in page.find_element("id", "title-variants").text
    )
    from selenium.webdriver.common.action_chains import ActionChains

    # The cell of row A in column 3, beside the letters and below the numbers.
    row = RESIDUE_ORDER.index("A")
    canvas = page.find_element("id", "map")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    left, top = (22 + 12 * 2 + 6) - canvas.size["width"] / 2, (34 + 12 * row + 6) - canvas.size["height"] / 2
    ActionChains(page).move_to_element_with_offset(canvas, left, top).perform()
    name = f"{protein[2]}7A"
    [score] = [one.score for one in expected.scores if one.variant == name]
    tip = page.find_element("id", "tip").text.split("\n")
    assert tip[0] == name
    assert float(tip[1]) == pytest.approx(score, abs=1e-3)
    lowest, highest = (find(expected.scores, key=lambda one: one.score) for find in (min, max))
    for one, likelier in ((lowest, False), (highest, True)):
        place = 22 + 12 * (int(one.variant[1:-1]) - 5) + 3, 34 + 12 * RESIDUE_ORDER.index(one.variant[-1]) + 3
        red, _, blue, _ = page.execute_script(PIXEL, canvas, *place)
        assert (blue > red) == likelier
    page.find_element("id", "csv-variants").click()
    rows = list(csv.DictReader(downloaded(page, "variants.csv").open()))
    assert [row["mutant"] for row in rows] == [one.variant for one in expected.scores]
    assert [float(row["score"]) for row in rows] == pytest.approx(expected.values, abs=1e-3)
    page.find_element("id", "png-variants").click()
    assert downloaded(page, "variants.png").read_bytes().startswith(b"\x89PNG")
    # The colours of the scale end before the scores do.
    scale = page.find_element("id", "scale").text
    ends = [float(end.split()[0]) for end in re.split("[≤≥]", scale)[1:]]
    assert ends == [-ends[1], pytest.approx(np.quantile(np.abs(expected.values), 0.98), abs=0.06)]
    assert f"scores from {lowest.score:.2f} to {highest.score:.2f}" in scale
    assert "esm2-mini" in page.find_element("css selector", "#result-variants .run").text
    assert errors(page) == []


def test_peptides_are_ranked(page, turbo):
    page.find_element("id", "tab-ranking").click()
    page.find_element("id", "example-ranking").click()
    page.find_element("id", "run-ranking").click()
    wait(lambda: page.find_element("id", "result-ranking").is_displayed())
    target = page.find_element("id", "target").get_attribute("value")
    peptides = page.find_element("id", "peptides").get_attribute("value").split("\n")
    expected = turbo.score(target, peptides)
    rows = [
        [cell.text for cell in row.find_elements("tag name", "td")]
        for row in page.find_elements("css selector", "#table-ranking tbody tr")
    ]
    assert [row[1] for row in rows] == [peptides[index] for index in expected.ranking()]
    # Compared with nothing, there is no specificity to explain or to sort by.
    hidden = page.find_elements("css selector", "#result-ranking .specific")
    assert hidden and not any(one.is_displayed() for one in hidden)
    assert page.find_element("id", "title-ranking").text == f"{len(peptides)} peptides, ranked by pseudo-perplexity"
    page.find_element("id", "csv-ranking").click()
    table = list(csv.DictReader(downloaded(page, "ranking.csv").open()))
    assert [row["candidate"] for row in table] == [row[1] for row in rows]
    assert errors(page) == []


SECOND = "GSGSWKDLAEPLLKRRMK"
BOTH = f">first of two\nMKTAYIAK\nQRQ\n>second\n{SECOND}\n"


def run(page, tab, name, **fields):
    """Fill in a tab, run it, and return the cells of its table."""
    page.find_element("id", f"tab-{tab}").click()
    for field, value in fields.items():
        page.execute_script("arguments[0].value = arguments[1]", page.find_element("id", field), value)
    page.find_element("id", f"run-{name}").click()
    wait(lambda: page.find_element("id", f"run-{name}").is_enabled())
    assert page.find_element("id", f"error-{name}").text == ""
    return cells(page, name)


def cells(page, name):
    # At once, as the page may replace the table meanwhile.
    rows = f"[...document.querySelectorAll('#table-{name} tbody tr')]"
    return page.execute_script(f"return {rows}.map((row) => [...row.cells].map((cell) => cell.innerText))")


def test_records_of_fasta_are_proteins_of_their_own(page):
    run(page, "variants", "variants", protein=BOTH)
    assert page.find_element("id", "title-variants").text == "209 substitutions of 11 residues"
    choice = page.find_element("id", "which-variants")
    assert choice.text.split() == ["first", "second"]
    choice.find_elements("tag name", "option")[1].click()
    assert (
        page.find_element("id", "title-variants").text == f"{19 * len(SECOND)} substitutions of {len(SECOND)} residues"
    )


def test_specific_peptides_come_first_and_the_best_are_scored_again(page, turbo):
    peptides = ["GSGSWKDLAE", "PLLKRR", "HHHH"]
    # Pasted twice, a target is compared with as one.
    targets = BOTH + BOTH.replace(">", ">again_")
    rows = run(page, "ranking", "ranking", target=targets, peptides="\n".join(peptides), background="targets")
    found = [turbo.score(target, peptides).scores for target in ("MKTAYIAKQRQ", SECOND)]
    expected = {
        one.candidate: one.mean_log_probability - other.mean_log_probability for one, other in zip(*found, strict=True)
    }
    assert [row[1] for row in rows] == sorted(expected, key=expected.__getitem__, reverse=True)
    assert [float(row[4]) for row in rows] == pytest.approx([expected[row[1]] for row in rows], abs=2e-3)
    assert all(one.is_displayed() for one in page.find_elements("css selector", "#result-ranking .specific"))
    page.execute_script("arguments[0].value = '2'", page.find_element("id", "best"))
    page.find_element("id", "again").click()
    wait(lambda: len(cells(page, "ranking")[0]) == 8)
    assert [row[7] != "" for row in cells(page, "ranking")] == [True, True, False]
    page.execute_script("arguments[0].value = '3'", page.find_element("id", "best"))
    page.find_element("id", "again").click()
    wait(lambda: all(row[7] for row in cells(page, "ranking")))
    full = turbo.score("MKTAYIAKQRQ", peptides, refresh=11)
    # By specificity: the likelihood is recomputed, its background stays.
    specific = {
        one.candidate: one.mean_log_probability - other.mean_log_probability
        for one, other in zip(full.scores, found[1], strict=True)
    }
    ranks = {one: rank for rank, one in enumerate(sorted(specific, key=specific.__getitem__, reverse=True), start=1)}
    perplexities = {one.candidate: one.pseudo_perplexity for one in full.scores}
    for _, peptide, *_, perplexity, specificity, rank in cells(page, "ranking"):
        assert float(perplexity) == pytest.approx(perplexities[peptide], rel=1e-3)
        assert float(specificity) == pytest.approx(specific[peptide], abs=2e-3)
        assert int(rank) == ranks[peptide]
    (page.downloads / "ranking.csv").unlink(missing_ok=True)
    page.find_element("id", "csv-ranking").click()
    [columns, *table] = csv.reader(downloaded(page, "ranking.csv").open())
    assert columns[-4:] == [
        f"recomputed_{one}" for one in ("pseudo_perplexity", "specificity", "specificity_z", "rank")
    ]
    assert {row[2]: int(row[-1]) for row in table if row[0] == "first"} == ranks
    # By likelihood.
    page.find_element("css selector", "#sort option[value=mean_log_probability]").click()
    order = [peptides[index] for index in full.ranking()]
    assert {row[1]: int(row[6]) for row in cells(page, "ranking")} == {one: order.index(one) + 1 for one in order}


def test_specificity_ranks_in_standard_deviations_where_all_peptides_have_them(page, turbo):
    peptides = ["GSGSWKDLAE", "PLLKRR", "HHHH", "WTCAC", "DEFGH"]
    rows = run(page, "ranking", "ranking", target=SECOND, peptides="\n".join(peptides), background="decoys")
    expected = turbo.score(SECOND, peptides, background="all-decoys", sort_by="specificity")
    assert [row[1] for row in rows] == [peptides[index] for index in expected.ranking()]
    page.execute_script("arguments[0].value = '5'", page.find_element("id", "best"))
    page.find_element("id", "again").click()
    wait(lambda: len(cells(page, "ranking")[0]) == 9)
    full = turbo.score(SECOND, peptides, refresh=len(SECOND))
    background = {one.candidate: one.background for one in expected.scores}
    recomputed = expected.with_exact(range(5), full.with_background(background, "decoys"))
    by_peptide = {
        one.candidate: (one.specificity_z, rank)
        for one, (*_, rank) in zip(recomputed.rescored.values(), recomputed.rescored_cells(), strict=True)
    }
    for _, peptide, *_, specificity, rank in cells(page, "ranking"):
        assert (float(specificity), int(rank)) == (
            pytest.approx(by_peptide[peptide][0], abs=0.02),
            by_peptide[peptide][1],
        )


def test_several_targets_are_compared_with_each_other_unless_something_else_was_chosen(page):
    page.find_element("id", "tab-ranking").click()
    target, background = page.find_element("id", "target"), page.find_element("id", "background")
    for text, expected in ((SECOND, "none"), (BOTH, "targets"), (">one\nMKT\n", "none")):
        target.clear()
        target.send_keys(text)
        assert background.get_property("value") == expected
    background.find_element("css selector", "option[value=alone]").click()
    target.clear()
    target.send_keys(BOTH)
    assert background.get_property("value") == "alone"


def test_proteins_are_embedded_and_designed(page, turbo):
    rows = run(page, "embedding", "embedding", sequences=BOTH)
    assert [row[:2] for row in rows] == [["first", "11"], ["second", str(len(SECOND))]]
    assert "preset" not in page.find_element("css selector", "#result-embedding .run").text
    rows = run(page, "design", "design", scaffold="MKTXXIAK", samples="2", seed="3")
    made = turbo.generate("MKT<mask><mask>IAK", num_return_sequences=2, seed=3)
    assert [row[2] for row in rows] == made.sequences


def test_peptides_with_fixed_residues_are_designed_for_a_target_and_ranked(page, turbo):
    fields = {"scaffold": f">t\n{SECOND}", "template": "GX[KR]XXP", "samples": "8", "seed": "3"}
    rows = run(page, "design", "design", **fields)
    made = turbo.generate_binders(
        SECOND, template="GX[KR]XXP", num_return_sequences=8, seed=3, background="decoys", sort_by="specificity"
    )
    assert [row[1] for row in rows] == [one.sequence for one in made.binders]
    assert [float(row[4]) for row in rows] == pytest.approx([one.score.specificity_z for one in made.binders], abs=0.02)
    assert "standard deviations" in page.find_element("id", "ranked-design").text
    titled = f"{len(rows)} different peptides for t ({len(SECOND)} residues), of 8 drawn"
    assert page.find_element("id", "title-design").text == titled
    page.find_element("id", "fasta-design").click()
    assert downloaded(page, "designs.fasta").read_text().split("\n")[1] == made.binders[0].sequence
    rows = run(page, "design", "design", **fields | {"design-background": "none"})
    assert [len(row) for row in rows] == [3] * len(rows)
    run(page, "design", "design", **fields | {"scaffold": SECOND})
    assert page.find_element("id", "title-design").text == titled.replace("for t", "for the target")
    page.execute_script("arguments[0].value = 'G1P'", page.find_element("id", "template"))
    page.find_element("id", "run-design").click()
    wait(lambda: "templates are written as GX[KR]XXP" in page.find_element("id", "error-design").text)
    page.execute_script("arguments[0].value = ''", page.find_element("id", "template"))


def test_a_wrong_residue_is_told_and_can_be_corrected(page):
    page.find_element("id", "protein").send_keys(">a header\nMKTA1IAK")
    page.find_element("id", "run-variants").click()
    message = wait(lambda: page.find_element("id", "error-variants").text)
    assert message.startswith("sequence: position 5 is '1'")
    assert not page.find_element("id", "result-variants").is_displayed()
    page.find_element("id", "protein").clear()
    page.find_element("id", "protein").send_keys("MKTAYIAK")
    page.find_element("id", "run-variants").click()
    wait(lambda: page.find_element("id", "result-variants").is_displayed())
    assert page.find_element("id", "error-variants").text == ""


def test_homologs_are_asked_for_where_a_model_reads_them(browser, client, tmp_path):
    browser.get(f"http://127.0.0.1:{client.port}/")
    wait(lambda: "esm2-mini" in browser.find_element("id", "service").text)
    assert not browser.find_element("id", "homologs-variants").is_displayed()
    e1 = TurboEsm.from_pretrained(E1_MINI, preset="exact", device="cpu")
    protein = "MKNKVVVVTGVPGVGGTT"
    # A stop at the end is none of the residues, and HH-suite's annotations are no homologs.
    aligned = f">ss_pred\n{'C' * len(protein)}\n>wt\n{protein}*\n>a\n--MKIGIVpfTGIPGVGKST\n>b\nMRHVVVVTGVPGVGKTT-\n"
    context = "MKIGIVPFTGIPGVGKST,MRHVVVVTGVPGVGKTT"
    with running(e1, tmp_path / "store") as client:
        browser.get(f"http://127.0.0.1:{client.port}/")
        wait(lambda: browser.find_element("id", "homologs-variants").is_displayed())
        assert not browser.find_element("id", "tab-ranking").is_displayed()
        fields = {"protein": f"{protein}*", "homologs-variants": aligned}
        found = {row[0]: float(row[1]) for row in run(browser, "variants", "variants", **fields)}
        expected = {one.variant: one.score for one in e1.score_variants(protein, context=context).scores}
        assert found == {name: pytest.approx(expected[name], abs=2e-3) for name in found}
        fields = {"sequences": protein, "homologs-embedding": aligned}
        run(browser, "embedding", "embedding", **fields)
        assert "arm frozen" in browser.find_element("css selector", "#result-embedding .run").text
        fields = {
            "scaffold": "MKNKXVVVTG",
            "homologs-design": ">wt\nMKNKVVVVTG\n>a\nMKIGIV-FTGIP\n",
            "samples": "2",
            "seed": "3",
        }
        rows = run(browser, "design", "design", **fields)
        made = e1.generate("MKNK?VVVTG", num_return_sequences=2, seed=3, context="MKIGIVFTGIP")
        assert [row[2] for row in rows] == made.sequences
        browser.find_element("id", "tab-variants").click()
        browser.find_element("id", "homologs-variants").send_keys(">wrong\nMK1\n")
        browser.find_element("id", "run-variants").click()
        message = wait(lambda: browser.find_element("id", "error-variants").text)
        assert message.startswith("homologs: wrong: position 3 is '1'")
        for kind in ("browser", "performance"):
            browser.get_log(kind)


def test_the_documentation_shows_every_endpoint(page, client):
    page.get(f"http://127.0.0.1:{client.port}/docs")
    wait(lambda: page.find_elements("css selector", "#endpoints h2"))
    shown = {title.text for title in page.find_elements("css selector", "#endpoints h2")}
    assert {"POST /v1/contexts", "POST /v1/contexts/{id}/score", "POST /v1/embeddings", "GET /healthz"} <= shown
    assert errors(page) == []


def test_a_token_is_asked_for(browser, turbo, tmp_path):
    with running(turbo, tmp_path / "store", tokens=[TOKEN]) as client:
        browser.get(f"http://127.0.0.1:{client.port}/")
        browser.find_element("id", "protein").send_keys("MKTAYIAK")
        browser.find_element("id", "run-variants").click()
        wait(lambda: "a bearer token is needed" in browser.find_element("id", "error-variants").text)
        browser.find_element("id", "token").send_keys(TOKEN)
        browser.find_element("id", "run-variants").click()
        wait(lambda: browser.find_element("id", "result-variants").is_displayed())
