"""No room has more lines of Python than the table of docs/design.md allows it."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = (REPOSITORY / "docs" / "design.md").read_text().partition("| lines at most |\n")[2].partition("\n\n")[0]


def limits(table: str) -> dict[tuple[str, ...], int]:
    """The most lines of rooms that share a number, from the table's rows; "with `room`" is the number of that row."""
    groups: dict[str, list[str]] = defaultdict(list)
    numbers: dict[str, int] = {}
    for line in table.splitlines()[1:]:
        first, *_, last = (cell.strip() for cell in line.strip("|").split("|"))
        names = re.findall(r"`(\w+)/?`", first)
        if other := re.fullmatch(r"with `(\w+)/?`", last):
            groups[other[1]] += names
        else:
            numbers[names[0]] = int(last.replace(",", ""))
            groups[names[0]] += names
    assert groups.keys() == numbers.keys()
    return {tuple(names): numbers[first] for first, names in groups.items()}


def lines(room: str) -> int:
    """The lines of Python of a room of the package, or of a folder beside it."""
    base = REPOSITORY if room in ("launch", "tests") else REPOSITORY / "ddpm_ds"
    files = [base / f"{room}.py"] if (base / f"{room}.py").exists() else sorted((base / room).rglob("*.py"))
    assert files, f"docs/design.md names {room}, which is not there"
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("rooms", limits(ROOMS), ids="-".join)
def test_a_room_is_no_larger_than_its_number(rooms: tuple[str, ...]) -> None:
    limit, found = limits(ROOMS)[rooms], sum(map(lines, rooms))
    assert found <= limit, (
        f"{', '.join(rooms)}: {found:,} lines, at most {limit:,}; shorten it, or raise docs/design.md"
    )


def test_every_module_counts_somewhere() -> None:
    named = {room for rooms in limits(ROOMS) for room in rooms} - {"launch", "tests"}
    package = REPOSITORY / "ddpm_ds"
    assert named == {path.stem for path in package.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
