"""The pages say what is there: generated ones are current, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from optima_lite.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[1]
GENERATOR = ROOT / "docs" / "generate.py"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> Path:
    path = ROOT / request.param
    if not path.is_file():
        pytest.skip(f"{request.param} does not exist yet")
    return path


def generate(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else []
    return subprocess.run(
        [sys.executable, *start, str(GENERATOR), *words], capture_output=True, text=True, cwd=ROOT
    )


# -- generated pages ------------------------------------------------------------------------------


def test_generated_pages_are_current():
    result = generate("--check")
    assert result.returncode == 0, result.stderr


def test_check_names_the_stale_page_and_leaves_it(tmp_path: Path):
    copy = tmp_path / "generate.py"
    copy.write_bytes(GENERATOR.read_bytes())
    (tmp_path / "records.md").write_bytes((ROOT / "docs" / "records.md").read_bytes())
    (tmp_path / "cli.md").write_text("old", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, str(copy), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 1
    assert "docs/cli.md" in result.stderr
    assert "docs/records.md" not in result.stderr
    assert (tmp_path / "cli.md").read_text(encoding="utf-8") == "old"


def test_pages_are_made_without_torch():
    code = (
        "import runpy, sys; page = runpy.run_path(sys.argv[1]); "
        "page['cli_page'](); page['records_page'](); sys.exit('torch' in sys.modules)"
    )
    assert generate(code=code).returncode == 0


# -- links ----------------------------------------------------------------------------------------


def test_relative_links_lead_somewhere(page: Path):
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes it: `## Own data` -> own-data."""
    text = without_code(page.read_text(encoding="utf-8"), inline=False)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str, inline: bool = True) -> str:
    text = FENCE.sub("", text)
    return re.sub(r"`[^`\n]*`", "", text) if inline else text


# -- commands and options -------------------------------------------------------------------------


def test_commands_and_options_exist(page: Path):
    """`optima-lite NAME …` in code (inline also `NAME --option`) is checked against NAME's options;
    an option that stands alone has to be some command's. Other programs' lines are not ours.
    """
    known = options()
    for code, inline in code_pieces(page.read_text(encoding="utf-8")):
        words = code.split()
        if not words:
            continue
        command = called(words, inline)
        if command is not None:
            assert command in known, f"{page.name}: no command {command!r} in: {code}"
        elif not words[0].startswith("-"):
            continue
        allowed = known[command] if command is not None else set().union(*known.values())
        for option in OPTION.findall(code):
            assert option in allowed, f"{page.name}: no {option} in: {code}"


def called(words: list[str], inline: bool) -> str | None:
    """The command that a piece of code calls; "" is the group itself, None is another program."""
    for i, word in enumerate(words[:-1]):
        if word in ("optima-lite", "optima_lite") and re.fullmatch(r"-*[a-z]+", words[i + 1]):
            return "" if words[i + 1].startswith("-") else words[i + 1]
    return words[0] if inline and words[0] in COMMANDS and len(words) > 1 else None


def code_pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Lines of code blocks and inline code (true), split where a shell starts a new command."""
    blocks = FENCE.findall(text)
    inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for code, is_inline in [*((line, False) for line in lines), *((span, True) for span in inline)]:
        # A | inside [a|b] is a choice, not a pipe.
        for piece in re.split(r"\s[|;]\s|\s&&\s|\s#\s", f" {code} "):
            yield piece, is_inline


def options() -> dict[str, set[str]]:
    """Command -> its long options; the group is ""."""
    context = click.Context(cli, info_name="optima-lite", **cli.context_settings)
    commands: dict[str, click.Command] = {"": cli}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        commands[name] = command
    return {
        name: {"--help", *(o for param in command.params for o in param.opts if o[:2] == "--")}
        for name, command in commands.items()
    } | {"": {"--help", "--version", "--debug"}}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`optima-lite frobnicate x`", True),
        ("`optima-lite gen --resume`", False),
        ("`optima-lite eval --resume`", True),
        ("`gen --resume`", False),
        ("`select --resume`", True),
        ("`--lambda-token`", False),
        ("`--lambda-tokens`", True),
        ("`pip install --no-deps x`", False),
        ("```sh\noptima-lite tasks relay \\\n  --limit 3 | optima-lite gen --theta 1\n```", True),
        ("optima-lite is a program with two--dashes", False),
    ],
)
def test_the_check_sees_what_is_wrong(tmp_path: Path, text: str, wrong: bool):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    if wrong:
        with pytest.raises(AssertionError, match="no "):
            test_commands_and_options_exist(page)
    else:
        test_commands_and_options_exist(page)
