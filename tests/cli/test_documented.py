"""Commands of README and of the newcomers' pages, typed one after another in a terminal.

A comment before a page's block names options that are appended here, so that it trains less. The output that the page
shows below a block ends as here, numbers aside.
"""

import re
import time
from pathlib import Path

import pytest

from ddpm_ds.processes.ranks import free_port
from tests.forking import REPOSITORY
from tests.terminal import Terminal

pytestmark = [pytest.mark.launch, pytest.mark.long]

BLOCK = re.compile(
    r"(?:<!-- a test types this with: (?P<shorter>[^\n]*) -->\n)?"
    r"```bash\n(?P<command>.*?)\n```\n"
    r"(?:\n(?P<shown>(?:(?: {4}[^\n]*)?\n)+))?",
    re.DOTALL,
)
SIGN_OF_LIFE_SECONDS = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the parts of a fresh clone that the commands need."""
    for name in ("ds_configs", "launch"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def type_in(command: str, folder: Path) -> Terminal:
    """Type a command, wait for its end, and look at the screen."""
    begun = time.monotonic()
    terminal = Terminal(["bash", "-ec", command], folder)
    terminal.read(lambda text: text.strip() != "")
    assert time.monotonic() - begun < SIGN_OF_LIFE_SECONDS, command
    assert terminal.ended() == 0, terminal.text
    return terminal


def last_line(text: list[str]) -> str:
    """Return the last line with text, with 0 for every number and one space between columns."""
    return re.sub(r"\d[\d,.]*", "0", [" ".join(line.split()) for line in text if line.strip()][-1])


PAGES = {
    "tutorial": [
        "python -",
        "cat >",
        "ddpm-ds train",
        "ddpm-ds train",
        "ddpm-ds sample",
        "ddpm-ds train",
        "ddpm-ds diagnose",
    ],
    "fields": [
        "python launch/examples/make_fields.py",
        "ddpm-ds train",
        "ddpm-ds evaluate",
        "ddpm-ds sample",
        "ddpm-ds train",
        "ddpm-ds prepare",
        "ddpm-ds train",
        "ddpm-ds evaluate",
    ],
    "space": ["python launch/examples/make_fields.py", "ddpm-ds train", "ddpm-ds sample"],
    "text": ["python launch/examples/make_text.py", "ddpm-ds prepare", "ddpm-ds train", "ddpm-ds sample"],
    "upscaling": ["python -", "ddpm-ds train", "ddpm-ds evaluate", "ddpm-ds sample"],
}
"""Pages of docs/ that a newcomer can type, and how their commands begin."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_it_is_typed(page: str, folder: Path) -> None:
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    blocks = [match.groupdict() for match in BLOCK.finditer(text)]
    assert [" ".join(block["command"].split()[:2]) for block in blocks] == PAGES[page]
    for shown, spec in re.findall(r"`launch/specs/(\w+)\.yaml` has it all.*?```yaml\n(.*?)```", text, re.DOTALL):
        assert spec in (REPOSITORY / "launch" / "specs" / f"{shown}.yaml").read_text()
    for block in blocks:
        screen = type_in(f"{block['command']} {block['shorter'] or ''}".strip(), folder)
        screen.assert_clean()
        if block["shown"]:
            assert last_line(screen.lines) == last_line(block["shown"].splitlines())
    assert list(folder.glob("*/grid.png"))


def test_the_main_job_of_the_readme_works_as_it_is_typed(folder: Path) -> None:
    (command,) = re.findall(r"^    pip install -e \. && deepspeed (.*)$", (REPOSITORY / "README.md").read_text(), re.M)
    screen = type_in(f"deepspeed --master_port {free_port()} {command} --set train.images=320", folder)
    assert "Traceback" not in screen.text, screen.text
    ends = [line for line in screen.lines if line and not line.startswith("[20")]  # those are the launcher's
    assert re.fullmatch(r"open it at +http://127\.0\.0\.1:5000/\S+", ends[-1]), screen.text
