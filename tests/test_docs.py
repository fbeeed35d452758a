"""Links between pages lead somewhere, and the first page stays short."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if target.parent == REFERENCE and anchor:
        return target.exists()  # its sections are generated, and `make docs` checks links to them
    return target.exists() and (not anchor or anchor in anchors(target))


def test_links_between_pages_lead_somewhere():
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^()\s]+)\)", page.read_text())]
    assert len(links) > 100
    broken = {
        f"{page.relative_to(ROOT)}: {link}"
        for page, link in links
        if "://" not in link and not leads_somewhere(page, link)
    }
    assert broken == set()


def test_the_first_page_is_two_screens():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 110
    assert len(text.split()) <= 1100


def test_files_that_newcomers_are_sent_to_are_there():
    named = set(re.findall(r"`([\w/]+/[\w.]+\.(?:py|md|txt|toml))`", (ROOT / "CONTRIBUTING.md").read_text()))
    named = {name for name in named if "X.YY" not in name}
    assert len(named) > 15
    folders = (ROOT, ROOT / "vllm_rollout")
    assert {name for name in named if not any((folder / name).exists() for folder in folders)} == set()


VLLMS = {"nixl/pull_scheduler.py"}


def test_programs_that_pages_name_are_there():
    """The log is left out: it may name programs of earlier versions."""
    folders = ("benchmarks", "conformance", "csrc", "docs_tools", "examples", "kernels", "tests", "vllm_rollout")
    programs = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = {
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        if page.name != "log.md"
        for name in re.findall(r"`(\w+/[\w/]+\.(?:py|cpp|h))(?:::\w+)?`", page.read_text())
    }
    assert len(named) > 80
    missing = {(page, name) for page, name in named if not any(path.endswith(f"/{name}") for path in programs)}
    assert {(page, name) for page, name in missing if name not in VLLMS} == set()
