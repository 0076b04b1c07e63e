"""A stand-in for the Hugging Face hub: repositories are folders, of which files are copied to a cache."""

import shutil
from pathlib import Path

from huggingface_hub.utils import filter_repo_objects


class ModelHub:
    """Repositories by name; ``snapshot_download`` does what that of huggingface_hub does, and counts network calls."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.repositories = cache, dict[str, Path]()
        self.has_network, self.calls = True, 0

    def snapshot_download(
        self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool
    ) -> str:
        copy = self.cache / name
        if not local_files_only and self.has_network:
            self.calls += 1
            if name not in self.repositories:
                raise OSError("404: Repository Not Found\nmore")
            source = self.repositories[name]
            copy.mkdir(parents=True, exist_ok=True)
            files = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
            for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file, copy / file)
        if not copy.exists():
            raise OSError("Name or service not known\nmore")
        return str(copy)

    def downloaded(self, name: str) -> set[str]:
        copy = self.cache / name
        return {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
