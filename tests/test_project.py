"""Files that hosting sites, hooks and language models read: they call the project's own checks and name its pages."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from ddpm_ds.cli.main import make_parser
from ddpm_ds.config.ds_model import DsConfig
from ddpm_ds.config.spec import RunSpec
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


def keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The dotted keys of a section and of those inside it."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{field.alias or name}"
        kinds: list[Any] = [field.annotation]
        while kinds:
            kind = kinds.pop()
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, f"{prefix}{field.alias or name}.")
            kinds += get_args(kind)


# What these programs' users set, beside what every trainer has: losses, noise, captions, masks, parts of the network.
THEIRS = {
    "sd-scripts (kohya)": "min_snr_gamma debiased_estimation_loss scale_v_pred_loss_like_noise_pred v_pred_like_loss "
    "ip_noise_gamma noise_offset adaptive_noise_scale multires_noise_discount huber_schedule min_timestep max_timestep "
    "max_token_length clip_skip weighted_captions caption_dropout_rate enable_wildcard shuffle_caption keep_tokens "
    "keep_tokens_separator caption_tag_dropout_rate secondary_separator num_repeats is_reg prior_loss_weight flip_aug "
    "alpha_mask masked_loss conditioning_data_dir metadata_file enable_bucket bucket_reso_steps bucket_no_upscale "
    "block_lr zero_terminal_snr color_aug random_crop image_dir caption_extension resolution",
    "OneTrainer": "concepts balancing loss_weight layer_filter unmasked_weight normalize_masked_area_loss "
    "offset_noise_weight perturbation_noise_weight timestep_shift prompt_source keep_tags_count",
    "The scripts of diffusers": "--snr_gamma --noise_offset --input_perturbation --proportion_empty_prompts",
}


def test_coming_from_names_keys_and_verbs_that_exist_and_has_every_flag() -> None:
    page = (REPOSITORY / "docs" / "coming_from.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", page, re.MULTILINE)
    ours = {*keys(RunSpec, ""), *keys(DsConfig, "ds.")}
    prose = re.sub(r"^\|.*", "", page, flags=re.MULTILINE)
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?::[^`]*)?`", " ".join([prose, *(here for _, here in rows)]))
    assert len(named) > 60 and {name for name in named if name != "metadata.jsonl"} <= ours
    verbs = re.findall(r"^    (\w+)", make_parser().format_help(), re.MULTILINE)
    assert {*re.findall(r"`ddpm-ds (\w+)", page)} <= {*verbs}
    tables = {table.partition("\n")[0]: table for table in page.split("\n## ")[1:]}
    assert tables.keys() == THEIRS.keys()
    for name, flags in THEIRS.items():
        assert {*flags.split()} <= {*re.findall(r"`([^`]+)`", tables[name])}
