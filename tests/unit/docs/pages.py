"""Reads the project's pages: links, code blocks and tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


def pages() -> list[Path]:
    """Return every Markdown file of the project."""
    folders = (ROOT / "docs", ROOT / "examples")
    return [
        *sorted(ROOT.glob("*.md")),
        *(page for f in folders for page in sorted(f.rglob("*.md"))),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of code."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Return the blocks of one language in all pages."""
    return [block for page in pages() for block in _blocks(page) if block.language == language]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page=page, line=line, language=match[1], code=match[2])


def table(page: Path, header: str) -> list[list[str]]:
    """Return the cells of every table of a page whose header row starts with ``header``."""
    rows: list[list[str]] = []
    is_inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            is_inside = False
        elif line.startswith(header):
            is_inside = True
        elif is_inside and not line.startswith("|---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
