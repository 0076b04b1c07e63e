"""Files that hosting sites, hooks and language models read: they call the project's own checks and name its pages."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.forking import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
CI = (REPOSITORY / ".ci" / "run").read_text()
STEPS = re.search(r"\^\(([\w|]+)\)\$", CI)[1].split("|")  # type: ignore[index]


def test_workflows_only_call_ci_with_steps_that_it_has_and_every_quick_one_on_the_oldest_and_newest_python() -> None:
    called: list[str] = []
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            for run in (step["run"] for step in job["steps"] if "run" in step):
                program, *steps = run.split()
                assert program == ".ci/run" and set(steps) <= set(STEPS)
                called += steps
    assert sorted(called) == sorted(set(STEPS) - {"long"})
    pythons = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["tests"]["strategy"]["matrix"]["python"]
    named = re.findall(r":: Python :: (3\.\d+)", (REPOSITORY / "setup.cfg").read_text())
    assert pythons == [named[0], named[-1]]


def test_an_unknown_step_of_ci_is_refused_before_anything_is_installed() -> None:
    done = subprocess.run([REPOSITORY / ".ci" / "run", "lint", "tipes"], capture_output=True, text=True)
    steps = "lint|types|site|wheel|tests|capability|long"
    assert done.returncode == 2 and done.stderr.startswith(f"usage: .ci/run [{steps} ...]")


def test_hooks_of_a_commit_are_the_programs_of_ci_without_rules_of_their_own() -> None:
    (local,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local" and all(hook["language"] == "system" for hook in local["hooks"])
    for hook in local["hooks"]:
        assert re.search(rf"^    {hook['entry']}\b", CI, re.MULTILINE) and "args" not in hook


def test_the_site_has_every_page_for_language_models_too(tmp_path: Path) -> None:
    build = pytest.importorskip("mkdocs.commands.build").build
    load_config = pytest.importorskip("mkdocs.config").load_config
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(tmp_path)))
    text = (tmp_path / "llms.txt").read_text()
    linked = re.findall(r"^- \[[^]]+\]\((\w+\.md)\): \S.*$", text, re.MULTILINE)
    assert text.startswith("# ddpm_ds\n\n> ") and sorted(linked) == sorted(
        path.name for path in (REPOSITORY / "docs").glob("*.md")
    )
    for name in linked:
        assert (tmp_path / name).read_bytes() == (REPOSITORY / "docs" / name).read_bytes()
