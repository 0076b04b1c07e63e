"""A report that remembers what observers told it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Told:
    def __init__(self) -> None:
        self.logged: list[str] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[str] = []

    def log(self, line: str) -> None:
        self.logged.append(line)

    def observed(self, values: Mapping[str, float], step: int) -> None:
        self.metrics.append((step, dict(values)))

    def artifact(self, path: Path, folder: str = "") -> None:
        self.artifacts.append(f"{folder}/{path.name}")
