"""Run specs on disk: YAML, --set, one-line errors, and the committed schema and reference."""

import json
from pathlib import Path

import pytest
import yaml

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import SPEC, SPECS, load_spec, rewritten
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.schema.section import Section
from tests import launching
from tests.launching import REPOSITORY

DIGITS = SPECS / "digits.yaml"
SIZE = "a whole number from 1 to 8,192 or two of these, [height, width]"


def error_of(*overrides: str, path: Path = DIGITS) -> str:
    return launching.error_of(SpecError, load_spec, path, overrides)


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_spec_in_the_repository_loads_and_names_its_schema(path: Path) -> None:
    spec = load_spec(path, reads_data=False)
    assert spec.train.images % spec.train.batch_images == 0
    assert path.read_text().startswith("# yaml-language-server: $schema=run.schema.json\n")


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_spec_is_rewritten_where_it_differs_and_nowhere_else(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    own = ["data.path=x"] if "FOLDER" in text else []
    changes = [*own, "name=other", "optimizer.decay=cosine", "train.seed=3", "diffusion.loss=l1", "ema.on_host=true"]
    changed = load_spec(path, changes)
    found = rewritten(path, changed)
    (tmp_path / "spec.yaml").write_text(found)
    assert load_spec(tmp_path / "spec.yaml") == changed
    comments, others = ([line for line in one.splitlines() if "#" in line] for one in (text, found))
    assert [line for line in comments if line in others] == comments
    assert len(set(found.splitlines()) - set(text.splitlines())) <= len(changes) + 2, "two sections may be new"
    if not own:
        assert rewritten(path, load_spec(path)) == text


def test_cifar10_has_the_hyper_parameters_of_the_paper() -> None:
    spec = load_spec(SPECS / "cifar10.yaml")
    steps = 1 / spec.train.batch_images
    assert spec.train.batch_images == 128
    assert (spec.train.images * steps, spec.optimizer.warmup_images * steps) == (800_000, 5_000)
    assert (spec.unet.channels, spec.unet.multipliers, spec.unet.attention_resolutions) == (128, (1, 2, 2, 2), (16,))
    assert (spec.unet.dropout, spec.data.horizontal_flips) == (0.1, True)
    assert (spec.diffusion.schedule, spec.diffusion.timesteps) == ("linear", 1000)
    assert (spec.diffusion.beta_start, spec.diffusion.beta_end) == (1e-4, 0.02)
    assert (spec.optimizer.learning_rate, spec.optimizer.betas, spec.optimizer.weight_decay) == (2e-4, (0.9, 0.999), 0)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.learning_rate=1e-4", 1e-4),  # YAML 1.1 would read text
        ("train.images=1e6", 1_000_000),
        ("unet.multipliers=[1.0,2e0]", (1, 2)),
        ("optimizer.betas=[0.9, 0.95]", (0.9, 0.95)),
        ("train.accumulation=auto", "auto"),
        ("unet.head_channels=null", None),
        ("data.store_root=/tmp/stores", Path("/tmp/stores")),
        ("logging.experiment=2024-01-31T10:20:30Z", "2024-01-31T10:20:30Z"),  # YAML 1.1 would read a date
    ],
)
def test_an_override_has_the_type_of_its_field(override: str, value: object) -> None:
    place: object = load_spec(DIGITS, [override])
    for name in override.partition("=")[0].split("."):
        place = getattr(place, name)
    assert place == value
    assert type(place) is type(value) or isinstance(place, Path)


def test_the_last_override_wins_and_sections_may_be_absent_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(DIGITS.read_text().replace("diffusion:\n  schedule: linear\n  objective: eps\n  loss: l2\n", ""))
    spec = load_spec(path, ["train.seed=1", "train.seed=2", "diffusion.loss=l1"])
    assert (spec.train.seed, spec.diffusion.loss) == (2, "l1")


def test_a_section_that_may_be_null_is_set_by_its_keys_or_taken_away(tmp_path: Path) -> None:
    (file := tmp_path / "null.yaml").write_text(DIGITS.read_text().replace("data:\n", "data:\n  condition: null\n"))
    for path in (DIGITS, file):
        made = load_spec(path, ["data.condition.kind=reduced", "data.condition.factor=2"]).data.condition
        assert made is not None and (made.kind, made.factor) == ("reduced", 2)
        assert load_spec(path, ["data.condition.kind=reduced", "data.condition=null"]).data.condition is None
    fix = "is a section; set one of its keys, such as"
    assert error_of("data.condition=3") == f"--set data.condition=3: data.condition {fix} data.condition.kind"
    assert error_of("data=null") == f"--set data=null: data {fix} data.source"
    assert error_of("data.condition.facto=2").endswith("facto is unknown; did you mean data.condition.factor?")


def test_a_misspelt_key_is_answered_with_the_nearest_one() -> None:
    for section_name, section in RunSpec.model_fields.items():
        if not (isinstance(section.annotation, type) and issubclass(section.annotation, Section)):
            continue
        for field in section.annotation.model_fields:
            message = error_of(f"{section_name}.{field}x=1")
            assert message.endswith(f"{section_name}.{field}x is unknown; did you mean {section_name}.{field}?")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("unt.channels=3", "unt is unknown; did you mean unet?"),
        ("unet.channels=many", 'unet.channels = "many" should be a whole number from 1 to 65,536'),
        ("unet.dropout=1.5", "unet.dropout = 1.5 should be a number >= 0 and < 1"),
        (
            "unet.multipliers=1,2",
            'unet.multipliers = "1,2" should be a list of 1 to 14, each a whole number from 1 to 65,536',
        ),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9] should be [a number >= 0 and < 1, a number >= 0 and < 1]"),
        ("train.accumulation=some", 'train.accumulation = "some" should be a whole number from 1 to 2^20 or "auto"'),
        ("data.image_size=[32]", f"data.image_size = [32] should be {SIZE}"),
        ("name=a b", 'name = "a b" should be text of 1 to 200 printable characters like [A-Za-z0-9._-]+'),
        ('logging.experiment="a\\nb"', 'logging.experiment = "a\\nb" should be text of 1 to 200 printable characters'),
        ("unet=3", "unet is a section; set one of its keys, such as unet.channels"),
        ("unet.channels.x=3", "unet.channels is a value, not a section; set it alone"),
        ("unet.channels", "write section.key=value, such as unet.dropout=0.1"),
        ("train.images=[", "not YAML in line 1: expected the node content, but found '<stream end>'"),
    ],
)
def test_a_wrong_override_is_one_line_with_key_value_and_fix(override: str, message: str) -> None:
    assert error_of(override) == f"--set {override}: {message}"


def test_overrides_that_contradict_the_file_are_shown_beside_it() -> None:
    assert error_of("train.accumulation=3").startswith(f"{DIGITS} --set train.accumulation=3: train.batch_images = 64")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["null", "sections"]),
        ("name: [1", ["not YAML in line 1"]),
        ("name: a\nname: b", ["not YAML in line 1", "name is given twice"]),
        ("name: a\ndata:\n  channels: 1\n  channels: 3", ["channels is given twice"]),
        ("name: a\ndata: 3", ["data = 3 should be a section with source"]),
        ("name: a\nuent: {}", ["uent is unknown; did you mean unet?"]),
        ("name: a\ndata: {source: digits, channels: 1}", ["data.image_size is missing; it takes a whole number"]),
        ("name: &a a\nlogging: {experiment: *a}", ["not YAML in line 2", "the alias *a is not read; write the value"]),
        ('name: "\\udcff"', ["half of a surrogate pair"]),
    ],
)
def test_a_bad_file_is_a_line_for_each_fault_with_the_path_and_the_fix(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert any(all(word in line for word in words) for line in lines)


def test_a_missing_file_is_answered_with_the_nearest_one() -> None:
    assert error_of(path=SPECS / "digit.yaml").endswith(f"no such run spec; did you mean {DIGITS}?")
    assert "no such run spec" in error_of(path=Path("/nowhere/x.yaml"))
    assert "can't be read as a run spec" in error_of(path=SPECS)


def test_the_committed_schema_is_current() -> None:
    committed = json.loads((SPECS / "run.schema.json").read_text())
    assert committed == SPEC.file_schema(), "run: ddpm-ds schema > launch/specs/run.schema.json"


def test_the_committed_reference_is_current() -> None:
    committed = (REPOSITORY / "docs" / "spec.md").read_text()
    assert committed.endswith(SPEC.markdown()), "replace the reference by what `ddpm-ds schema spec --markdown` prints"


@pytest.mark.parametrize("key", ["data.path", "data.autoencoder", "data.store_root", "train.initial_weights"])
def test_a_tilde_is_the_home_folder_in_every_path_of_the_spec(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    section, name = key.split(".")
    written = yaml.safe_load(DIGITS.read_text())
    written.setdefault(section, {})[name] = "~/mine"
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(written))
    needs = {"data.path": ["data.source=folder"], "data.autoencoder": ["sampler.clip=none"]}.get(key, [])
    for spec in (load_spec(DIGITS, [f"{key}=~/mine", *needs]), load_spec("~/spec.yaml", needs)):
        assert getattr(getattr(spec, section), name) == tmp_path / "mine"
    with pytest.raises(SpecError, match=rf"{key} = \"~nobody-here/a\" can't be a path: no home folder of this name"):
        load_spec(DIGITS, [f"{key}=~nobody-here/a"])


@pytest.mark.parametrize("name", ["digits", "digits.yaml", "specs/digits.yaml", "launch/specs/digits.yaml"])
def test_a_preset_is_found_by_its_name_from_any_folder_unless_there_is_such_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_spec(name) == load_spec(DIGITS)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("name: [")
    with pytest.raises(SpecError, match=f"{name}: not YAML"):
        load_spec(name)
    with pytest.raises(SpecError, match="no such run spec"):
        load_spec("elsewhere/digits.yaml")
