"""The page in a real browser: `make test-page`, which installs Chromium if it is missing."""

import shutil
import signal
from base64 import b64encode
from pathlib import Path

import pytest

from fastclip.run.load import load
from fastclip.tools.search.index import Index
from tests.evaluation import replica
from tests.tools.demo.collection import EVIL, write_images
from tests.tools.demo.served import Served

pytestmark = pytest.mark.page
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
CONTRAST = """
(element) => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (numbers(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}
"""
HAND_OVER = """
(element, [data, how]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)), files = new DataTransfer();
  files.items.add(new File([bytes], "sent.png", { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  element.dispatchEvent(
    how === "drop" ? new DragEvent("drop", { ...options, dataTransfer: files })
                   : new ClipboardEvent("paste", { ...options, clipboardData: files })
  );
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chromium")


@pytest.fixture(scope="module")
def run(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", str(folder / "cache"))
        return replica.tiny_run(folder / "trained")


@pytest.fixture(scope="module")
def images(folder):
    return write_images(folder / "images.tar")


@pytest.fixture(scope="module")
def index(run, images):
    return Index.open(str(run), str(images), workers=0)


@pytest.fixture(scope="module")
def served(run, images, folder):
    server = Served(run, images, folder / "served")
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("These tests need Chromium, which is not installed; `make test-page` installs it.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, served):
    """Open the page; at the end, check that no other site was contacted and no script failed."""
    requested, failed, contexts = [], [], []

    def open_with(**options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(served.address)
        page.wait_for_selector("#query input")
        return page

    yield open_with
    for context in contexts:
        context.close()
    assert requested
    assert not [url for url in requested if not url.startswith((f"{served.address}/", "data:", "blob:"))]
    assert not failed


@pytest.fixture
def page(open_page):
    return open_page()


def search(page, text):
    page.locator("#query input").fill(text)
    page.locator("#query input").press("Enter")
    page.wait_for_selector("#found li")


def go_to(page, tab):
    page.get_by_role("tab", name=tab).click()


def scores(page, where):
    return [float(text) for text in page.locator(f"{where} .score").all_inner_texts()]


def test_a_query_shows_the_images_that_the_index_finds(page, index):
    search(page, "a red heart")
    matches = index.by_text("a red heart", 12)
    names = [card.get_attribute("title") for card in page.locator("#found li").all()]
    assert names == [Path(match.name).name for match in matches]
    assert scores(page, "#found") == pytest.approx([match.score for match in matches], abs=6e-4)
    loaded = "images => images.every(image => image.complete && image.naturalWidth > 0)"
    assert page.locator("#found img").evaluate_all(loaded)


def test_an_example_and_more_results_are_a_click_away(page):
    example = page.locator(".example").first
    example.click()
    page.wait_for_selector("#found li")
    assert page.locator("#query input").input_value() == example.inner_text()
    page.get_by_label("24").check()
    page.wait_for_function("document.querySelectorAll('#found li').length === 24")


def test_a_script_in_a_caption_is_shown_and_does_not_run(page):
    search(page, EVIL)
    page.get_by_label("48").check()
    page.wait_for_function("document.querySelectorAll('#found li').length === 30")
    assert EVIL in page.locator("#found .words").all_inner_texts()
    assert page.evaluate("window.ran") is None


@pytest.mark.parametrize("how", ["chosen", "drop", "paste"])
def test_an_image_shows_the_captions_that_the_index_finds(page, index, tmp_path, how):
    (tmp_path / "sent.png").write_bytes(replica.png(3))
    if how == "chosen":
        go_to(page, "Find captions")
        page.locator("#caption-picture input[type=file]").set_input_files(tmp_path / "sent.png")
    elif how == "drop":
        go_to(page, "Find captions")
        page.locator("#caption-picture button:has(input)").evaluate(
            HAND_OVER, [b64encode(replica.png(3)).decode(), how]
        )
    else:  # pasting into another tab opens this one
        page.locator("#query input").evaluate(HAND_OVER, [b64encode(replica.png(3)).decode(), how])
    page.wait_for_selector("#like li")
    expected = index.captions_for(tmp_path / "sent.png", 12)
    assert page.locator("#captions .words").all_inner_texts() == [match.text for match in expected]
    assert scores(page, "#captions") == pytest.approx([match.score for match in expected], abs=6e-4)
    assert page.locator("#like li").first.get_attribute("title") == "003.png"


def test_labels_get_the_probabilities_of_the_model(page, run, tmp_path):
    (tmp_path / "sent.png").write_bytes(replica.png(3))
    go_to(page, "Classify")
    page.locator("#classify-picture input[type=file]").set_input_files(tmp_path / "sent.png")
    page.wait_for_selector("#bars meter")  # of the labels that the page starts with
    page.locator("#labels textarea").fill("a red circle, a blue square, nothing")
    page.locator("#labels textarea").press("Enter")
    page.wait_for_function("document.querySelectorAll('#bars meter').length === 3")
    rows = page.locator("#bars meter").evaluate_all("bars => bars.map(bar => [bar.ariaLabel, bar.value])")
    labels, values = zip(*rows, strict=True)
    assert sum(values) == pytest.approx(1)
    assert [*values] == pytest.approx(
        load(run).classify(tmp_path / "sent.png", [*labels])[0].tolist(), abs=1e-5
    )
    page.locator("#labels textarea").fill("only one")
    page.locator("#labels textarea").press("Enter")
    page.wait_for_selector("#classify-note .wrong")
    assert page.locator("#bars meter").count() == 3  # earlier results stay


def test_the_page_can_be_used_by_keyboard(page):
    query = page.locator("#query input")
    page.wait_for_function("document.activeElement === document.querySelector('#query input')")
    page.keyboard.type("a/b")  # a slash in the field is a slash
    assert query.input_value() == "a/b"
    page.get_by_role("tab", name="Find images").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#caption-picture >> visible=true")
    page.keyboard.press("/")
    page.wait_for_function("document.activeElement === document.querySelector('#query input')")
    assert query.is_visible()
    assert query.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"


def test_after_rejected_input_the_page_still_works(page, tmp_path):
    (tmp_path / "text.png").write_text("text")
    go_to(page, "Find captions")
    page.locator("#caption-picture input[type=file]").set_input_files(tmp_path / "text.png")
    page.wait_for_selector("#captions-note .wrong")
    assert page.locator("#captions-note").inner_text()
    assert page.locator("#captions li").count() == 0
    go_to(page, "Find images")
    page.locator("#query input").fill("")
    page.locator("#query input").press("Enter")
    page.wait_for_selector("#found-note .wrong")
    search(page, "a cat")
    assert page.locator("#found li").count() == 12


def test_a_phone_scrolls_only_vertically(open_page):
    page = open_page(**PHONE)
    search(page, "a cat")
    columns = page.locator(".cards").evaluate(
        "list => getComputedStyle(list).gridTemplateColumns.split(' ').length"
    )
    assert columns in (2, 3)
    for tab in ("Find images", "Find captions", "Classify"):
        go_to(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(open_page, scheme):
    page = open_page(color_scheme=scheme)
    search(page, "a cat")
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    for where in (
        "h1",
        "#found .words",
        "#found .score",
        "#found-note p",
        "#query input",
        "#search",
        ".example",
    ):
        assert page.locator(where).first.evaluate(CONTRAST) >= 4.5, where


def test_ctrl_c_stops_it_while_a_browser_is_open(browser, run, images, folder):
    server = Served(run, images, folder / "interrupted")
    page = browser.new_page()
    page.goto(server.address)
    search(page, "a cat")
    server.end(signal.SIGINT)
    page.close()
