"""The batch script of Slurm with stand-ins for Slurm: what it starts and passes on, and when it queues itself again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launching import PATIENCE_SECONDS, REPOSITORY, place_program, wait_for

SCRIPT = REPOSITORY / "launch" / "clusters" / "slurm.sh"
SRUN = """#!/bin/bash
echo "srun $MASTER_ADDR:$MASTER_PORT $*" >>"$LOG"
trap 'echo "got USR1" >>"$LOG"; sleep 0.5; exit 75' USR1
trap 'echo "got TERM" >>"$LOG"; exit 1' TERM
[ -z "$CHECKPOINT" ] || { mkdir -p "$RUN_DIR/checkpoints"; echo "$CHECKPOINT" >"$RUN_DIR/checkpoints/latest"; }
[ "$ENDS" != stopped ] || while :; do sleep 0.05; [ ! -e "$LOG.stop" ] || { sleep 0.5; exit 75; }; done
exit "$ENDS"
"""
SCONTROL = """#!/bin/bash
case "$*" in
"show hostnames node-[3-4]") printf 'node-3\\nnode-4\\n' ;;
*) echo "scontrol $*" >>"$LOG" ;;
esac
"""
SQUEUE = """#!/bin/bash
[ "$*" = "--noheader --jobs=70123 --format=%T" ] && echo "$STATE"
"""
AGAIN = "scontrol requeue 70123"


class Job:
    """One allocation of a job after another, in a folder with stand-ins for Slurm."""

    def __init__(self, folder: Path) -> None:
        self.log, self.run_dir, self._bin = folder / "log", folder / "runs" / "run", folder / "bin"
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
            place_program(self._bin, name, text)

    def start(
        self, ends: int | str, *, checkpoint: str = "", state: str = "RUNNING", **environment: str
    ) -> subprocess.Popen[str]:
        """The batch script; its step ends with the code ``ends``, or with 75 when it is "stopped"."""
        self.log.write_text("")
        variables = {"LOG": str(self.log), "RUN_DIR": str(self.run_dir), "ENDS": str(ends), "STATE": state}
        variables |= {"CHECKPOINT": checkpoint, "SLURM_JOB_ID": "70123", "SLURM_JOB_NODELIST": "node-[3-4]"}
        variables |= {"PATH": f"{self._bin}:{os.environ['PATH']}", **environment}
        command = ["bash", str(SCRIPT), "-p", "2", "--set", "data.path=my pictures"]
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, ends: int | str, **environment: str) -> tuple[int, list[str]]:
        return self.end(self.start(ends, **environment))

    def end(self, script: subprocess.Popen[str]) -> tuple[int, list[str]]:
        said, _ = script.communicate(timeout=PATIENCE_SECONDS)
        assert "unbound" not in said and "not found" not in said, said
        return script.returncode, self.log.read_text().splitlines()

    def until(self, line: str) -> None:
        wait_for(lambda: line in self.log.read_text(), output=self.log.read_text)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_one_task_for_each_device_meets_on_the_first_node(job: Job) -> None:
    code, asked = job.run(0, SLURM_CPUS_PER_TASK="8")
    assert code == 0
    options = "--kill-on-bad-exit=0 --wait=0 --cpus-per-task=8"
    train = f"python -u launch/train.py --run-dir {job.run_dir} -p 2 --set data.path=my pictures"
    assert asked == [f"srun node-3:20123 {options} {train}"]


def test_the_signal_before_the_time_limit_reaches_the_ranks_and_the_job_is_queued_again(job: Job) -> None:
    script = job.start("stopped")
    job.until("srun")
    script.send_signal(signal.SIGUSR1)
    job.until("got USR1")
    script.send_signal(signal.SIGTERM)  # of Slurm, which tells the ranks itself
    code, asked = job.end(script)
    assert (code, asked[1:]) == (75, ["got USR1", AGAIN])


def test_a_preempted_job_waits_for_its_ranks_and_a_cancelled_one_is_not_queued_again(job: Job) -> None:
    for state, again in (("RUNNING", [AGAIN]), ("COMPLETING", [])):
        script = job.start("stopped", state=state)
        job.until("srun")
        script.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        stop = Path(f"{job.log}.stop")
        stop.touch()
        code, asked = job.end(script)
        stop.unlink()
        assert (code, asked[1:]) == (75, again)


def test_what_would_end_the_same_way_is_not_queued_again(job: Job) -> None:
    for code in (2, 3):
        ended, asked = job.run(code)
        assert (ended, len(asked)) == (code, 1)


def test_lost_ranks_are_started_again_some_times_and_a_new_checkpoint_gives_the_times_back(job: Job) -> None:
    def again(code: int, checkpoint: str = "") -> bool:
        ended, asked = job.run(code, checkpoint=checkpoint, LOST_IN_A_ROW="2")
        assert ended == code
        return asked[1:] == [AGAIN]

    assert [again(76), again(137), again(76)] == [True, True, False]
    assert [again(76, "images-10"), again(76, "images-10"), again(76, "images-10")] == [True, True, False]
    assert [again(76, "images-20"), job.run(0)[0], again(76), again(76)] == [True, 0, True, True]


@pytest.mark.needs_programs("shellcheck")
def test_the_script_is_clean() -> None:
    checked = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
