"""The documentation is true of what it describes, as far as links, settings, recipes, costs and figures go."""

import json
import posixpath
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from specbench.families import COLOURS

PROJECT = Path(__file__).parent.parent
DOCS = PROJECT / "docs"
README = PROJECT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
FIGURES = sorted((DOCS / "figures").glob("*.svg"))
FENCED = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
DRAFTERS = sorted(path.stem for path in (PROJECT / "conf/drafter").glob("*.yaml"))
RECIPES = sorted(path.stem for path in (PROJECT / "conf/recipe").glob("*.yaml"))
BOUNDS = ("none", "oracle", "scripted")


def named(path):
    return str(path.relative_to(PROJECT))


def prose(path):
    """A page without its blocks of code."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """Of each heading the anchor that GitHub makes of it, and that of the site: they differ where words are joined by
    what is left out, and then neither is to be linked."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower().strip())
        hosted, built = words.replace(" ", "-"), re.sub(r"[-\s]+", "-", words)
        if hosted == built:
            found.add(hosted)
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_and_anchors_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = Path(posixpath.normpath(page.parent / path)) if path else page
        assert there.exists(), link
        assert there.is_relative_to(PROJECT), link
        assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_lists_begin_after_an_empty_line(page):
    """The site takes them for part of the paragraph else."""
    lines = prose(page).splitlines()
    for before, line in pairwise(lines):
        starts = re.match(r"(- |\d+\. )", line) and not re.match(r"(- |\d+\. |  )", before)
        assert not starts or not before.strip(), line


def test_every_page_is_in_the_navigation():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    navigation = yaml.safe_load((PROJECT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(navigation)) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def flat(config, before=""):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        elif name != "_target_":
            yield f"{before}{name}", value


def table(page, comment):
    """Rows of the table below the line ``<!-- comment -->`` of a page, its head first, as lists of cells."""
    _, _, after = page.read_text(encoding="utf-8").partition(f"<!-- {comment} -->\n")
    rows = [line.strip("| ").split("|") for line in after.split("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row] for row in rows[:1] + rows[2:]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_settings_are_those_of_the_configuration(name):
    page = DOCS / f"drafters/{'bounds' if name in BOUNDS else name}.md"
    assert f"<!-- conf/drafter/{name}.yaml -->" in page.read_text()
    shown = {row[0]: yaml.safe_load(row[1]) for row in table(page, f"conf/drafter/{name}.yaml")[1:]}
    assert shown == dict(flat(yaml.safe_load((PROJECT / f"conf/drafter/{name}.yaml").read_text())))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_those_of_the_configuration(name):
    head, row = table(DOCS / f"drafters/{name}.md", f"conf/recipe/{name}.yaml")
    config = yaml.safe_load((PROJECT / f"conf/recipe/{name}.yaml").read_text())
    shown = dict(zip(head, map(float, row), strict=True))
    assert shown == {"k": config["k"], **{key: v for key, v in config["recipe"].items() if key != "_target_"}}


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in BOUNDS])
def test_every_drafter_has_a_page_with_figure_source_limits_and_paper(name):
    text = (DOCS / f"drafters/{name}.md").read_text()
    assert f"](../figures/{name}.svg)" in text
    assert f"](../../drafters/{name}.py)" in text
    assert re.search(r"^## Limits$", text, re.MULTILINE)
    assert re.search(r"^## Papers?$", text, re.MULTILINE)
    assert f"]({name}.md)" in (DOCS / "drafters/index.md").read_text()


def test_the_example_drafter_is_that_of_readme():
    shown = re.findall(r"^```(?:python|yaml)\n.*?^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(shown) == 3
    page = (DOCS / "add_drafter.md").read_text()
    assert all(block in page for block in shown)


def test_costs_are_those_of_the_reference_runs():
    def percent(share):
        return f"{share:.0%}".replace("%", " %")

    expected = {}
    for path in (PROJECT / "results/reference/quick").glob("*/run.json"):
        run = json.loads(path.read_text())
        name, k, model = run["drafter"]["name"], run["drafter"]["k"], run["model"]
        if k:
            costs = percent(model["draft_seconds"][str(k)] / model["plain_seconds"])
            expected[name] = [name, str(k), costs, f"{model['bound']:.2f}x", percent(model["break_even"])]
    assert len(expected) > 5
    assert {row[0]: row for row in table(DOCS / "drafters/index.md", "results/reference/quick")[1:]} == expected


@pytest.mark.parametrize("figure", FIGURES, ids=named)
def test_figures_are_of_one_style(figure):
    """Light and dark, titled, and in the colour of the family."""
    text = figure.read_text(encoding="utf-8")
    style = text[text.index("<style>") : text.index("</style>")]
    assert style in FIGURES[0].read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in style
    assert re.search(r"<title>\S.*</title>", text)
    assert f'color="{COLOURS.get(figure.stem, "#")}' in text
