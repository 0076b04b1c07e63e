"""A grid in MLflow: the run that its cells are children of, with the comparison of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence

from ddpm_ds.errors import UserError
from ddpm_ds.experiments.compare_command import FOLDER
from ddpm_ds.experiments.grid import BASELINE
from ddpm_ds.experiments.runs import GRID, KIND_TAG, find_run
from ddpm_ds.experiments.vary import Grid
from ddpm_ds.train.labels import labels
from ddpm_ds.train.run_folder import RunFolder, identity_of
from ddpm_ds.train.tracking import Tracker


def begin_parent(
    grid: Grid, experiment: str, params: Mapping[str, object], note: str | None, say: Callable[[str], None]
) -> tuple[Tracker, str]:
    """The run of a grid, begun or gone on with, and its identity."""
    tags = labels(grid.folder, note, say)
    identity = RunFolder(grid.folder).identity()
    tracker = Tracker.start(
        experiment,
        grid.folder.name,
        output_root=grid.folder.parent,
        run_dir=grid.folder,
        params=params,
        tags=tags | {KIND_TAG: GRID, "vary.name": grid.folder.name, "mlflow.source.name": "ddpm-ds vary"},
        identity=identity,
        system_metrics=False,
        say=say,
    )
    return tracker, identity


def compare_cells(
    grid: Grid, metrics: Sequence[str] | None, tracker: Tracker, say: Callable[[str], None]
) -> str | None:
    """The cells that have got as far as MLflow side by side, as wide as the terminal.

    The comparison is kept in the grid's folder and among its run's artifacts. Where there is none, it is said why.
    """
    from ddpm_ds.experiments.compare import comparison
    from ddpm_ds.experiments.compare_html import page
    from ddpm_ds.experiments.compare_text import markdown, terminal

    begun = [cell for cell in grid.cells if identity_of(grid.run_dir(cell))]
    try:
        runs = {cell.name: find_run(str(grid.run_dir(cell))) for cell in begun}
        if not runs:
            return None
        compared = comparison(list(runs.values()), runs.get(BASELINE), metrics)
        contents = {"comparison.md": markdown(compared), "comparison.html": page(compared)}
    except UserError as error:
        say(f"no comparison: {error}")
        return None
    for name, text in contents.items():
        (grid.folder / name).write_text(text)
        tracker.artifact(grid.folder / name, FOLDER)
    return terminal(compared, shutil.get_terminal_size((120, 24)).columns)
