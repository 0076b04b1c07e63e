"""The Dockerfile, of which a build has to be asked for elsewhere: its steps are taken in a root of the same Debian.

What Docker does besides is done here by hand: mounts of a step, variables, user, working folder, process 1's command.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forking import REPOSITORY

FILE = REPOSITORY / "launch" / "clusters" / "Dockerfile"
SUITES = {"12": "bookworm", "13": "trixie"}
"""Names of Debian's releases."""
WAY_OUT = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")
"""Files with which this machine reaches registries of packages, beside pip's variables."""


def steps() -> list[tuple[str, str]]:
    text = "\n".join(line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def test_the_base_is_pinned_nothing_runs_as_root_and_health_is_the_doctors() -> None:
    found = dict(steps())
    assert re.fullmatch(r"debian:1[23]\.\d+-slim", found["FROM"])
    names = [name for name, _ in steps()]
    assert names.count("USER") == 1 and names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert found["USER"] == "1000" and "useradd --uid 1000" in " ".join(text for name, text in steps() if name == "RUN")
    assert json.loads(found["HEALTHCHECK"].partition("CMD ")[2])[:2] == ["ddpm-ds", "doctor"]
    assert "--mount=type=cache,target=/root/.cache/pip" in " ".join(text for _, text in steps())
    assert json.loads(found["ENTRYPOINT"]) == ["ddpm-ds"]


class Root:
    """A root of Debian in which the steps are taken; mounts are those of a step alone."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self._cache, self._user, self._working = folder, cache, "0", "/"
        self._variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self._variables["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        if certificates := os.environ.get("PIP_CERT"):  # a step may install Debian's in the same place
            shutil.copy(certificates, folder / "certificates.pem")
            self._variables["PIP_CERT"] = "/certificates.pem"

    def take(self, name: str, text: str) -> None:
        if name == "RUN":
            mounts = [word for word in text.split() if word.startswith("--mount=")]
            command = text.split(mounts[-1], 1)[1] if mounts else text
            self.run(["sh", "-c", command])
        elif name == "ENV":
            self._variables |= dict(word.split("=", 1) for word in shlex.split(text))
        elif name == "USER":
            self._user = text
        elif name == "WORKDIR":
            self._working = text

    def run(self, words: list[str]) -> str:
        """What a command in the root prints; the repository is at /src, as a copy, while it runs."""
        variables = {"HOME": "/root" if self._user == "0" else "/home/trainer", **self._variables}
        inside = ["chroot", f"--userspec={self._user}:{self._user}", str(self.folder), "env", "-i"]
        inside += [f"{name}={value}" for name, value in variables.items()]
        inside += ["sh", "-c", f'cd {shlex.quote(self._working)} && exec "$@"', "sh", *words]
        mounts = [
            f"mount -t proc proc {self.folder}/proc",
            f"mount --rbind /dev {self.folder}/dev",
            f"mount --bind {self._cache} {self.folder}/root/.cache/pip",
        ]
        script = " && ".join([*mounts, f"exec {shlex.join(inside)}"])
        done = subprocess.run(["unshare", "--mount", "sh", "-ec", script], capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap and mounts")
    folder, cache = tmp_path / "root", tmp_path / "cache"
    release = dict(steps())["FROM"].partition(":")[2].partition(".")[0]
    made = ["unshare", "--mount", "debootstrap", "--variant=minbase", SUITES[release], str(folder)]
    subprocess.run(made, check=True, capture_output=True)
    for file in map(Path, WAY_OUT):
        if file.is_file():
            (folder / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / file.relative_to("/"))
    ignored = shutil.ignore_patterns(*FILE.with_name("Dockerfile.dockerignore").read_text().split())
    top = str(REPOSITORY)
    shutil.copytree(top, folder / "src", ignore=lambda at, names: ignored(at, names) if at == top else set())
    (folder / "root" / ".cache" / "pip").mkdir(parents=True)
    cache.mkdir()
    yield Root(folder, cache)
    shutil.rmtree(folder)


@pytest.mark.launch
@pytest.mark.needs_programs("debootstrap", "chroot", "unshare")
def test_the_steps_make_a_root_in_which_the_main_job_trains_as_no_root(root: Root) -> None:
    for name, text in steps():
        root.take(name, text)
    shutil.rmtree(root.folder / "src")  # a mount, of which the image has nothing
    found = dict(steps())
    assert root.run(["id", "-u"]).strip() == "1000"
    assert "good" in root.run(json.loads(found["HEALTHCHECK"].partition("CMD ")[2])).splitlines()[-1]
    command = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    root.run([*command, "--device", "cpu", "--set", "train.images=320"])
    assert (root.folder / "work" / "runs" / "digits" / "checkpoints" / "latest").is_file()
    root.run(["ddpm-ds", "sample", "runs/digits", "--count", "2", "--out", "samples"])
