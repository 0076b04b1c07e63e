"""Stands for launch/train.py where only what happens to processes counts: each start plays one part after another.

deepspeed tests/fake_training.py --run-dir DIR PART [PART ...]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ddpm_ds.processes.ranks import TRAINING, Launcher, record, recorded, set_environment


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--local_rank")
    parser.add_argument("--resume", default="auto")
    parser.add_argument("parts", nargs="+")
    options = parser.parse_args()
    rank, folder = int(os.environ["RANK"]), options.run_dir
    starts = len(list(folder.glob(f"start-*-rank-{rank}")))
    part = options.parts[starts]
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    if part == "deaf":
        quiet = subprocess.DEVNULL
        helper = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=quiet, stderr=quiet)
        (folder / f"helper-{rank}").write_text(str(helper.pid))
    (folder / f"start-{starts}-rank-{rank}").write_text(str(os.getpid()))
    (folder / f"resume-{starts}").write_text(options.resume)

    if part.isdecimal():
        return int(part)
    begun, _, code = part.partition(":")
    if begun == "training":
        record(TRAINING)
    if code and rank == 0:  # when the other one is there
        while not (folder / f"start-{starts}-rank-1").exists():
            time.sleep(0.01)
        if code == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return int(code)
    if part == "checkpoint_and_die":
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "latest").write_text(f"images-{starts:09}")
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "kill_launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    if part == "environment":
        set_environment()
        (folder / "environment").write_text(json.dumps(dict(os.environ)))
        return 0
    if part == "raise":
        raise RuntimeError("a bug")
    launcher = Launcher()
    while not (stop or (part == "train" and launcher.is_gone())) or part == "deaf":
        time.sleep(0.05)
    (folder / f"saved-{starts}-rank-{rank}").touch()
    time.sleep(0.5)  # all ranks leave after the last has saved
    return 75


if __name__ == "__main__":
    sys.exit(recorded(main))
