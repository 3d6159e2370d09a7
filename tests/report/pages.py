"""Checks for all pages: well-formed, self-contained, and without errors in a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "wbr", "img", "hr"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """A parsed page: its tags, its text, its links. Tags that are not closed in order are an error."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.ids, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & {*self.open}:
            self.words.append(data)

    @property
    def text(self):
        """The visible text, with single spaces."""
        return " ".join(" ".join(self.words).split())


def check_page(text):
    """Returns the parsed page, after checks that apply to all pages."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    structure = [tag for tag, _ in page.tags if tag in ("html", "head", "body", "main", "h1")]
    assert structure == ["html", "head", "body", "h1", "main"]
    assert not re.search(r"https?://|@import|url\(", text)
    loading = [(tag, values) for tag, values in page.tags if "src" in values or tag in ("link", "iframe", "object")]
    assert loading == [("link", {"rel": "icon", "href": "data:,"})]
    assert len(set(page.ids)) == len(page.ids)
    targets = {values["href"] for tag, values in page.tags if tag == "a"}
    assert targets <= {f"#{identifier}" for identifier in page.ids}
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    return page


def browser_messages(file, folder, width=1280):
    """Returns the console messages of a browser, and the document after its scripts ran."""
    done = subprocess.run(
        [
            CHROMIUM,
            *(
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--enable-logging=stderr",
                "--virtual-time-budget=2000",
            ),
            *(f"--user-data-dir={folder}", f"--window-size={width},1200", "--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], done.stdout
