#!/bin/bash
# Train under Slurm on any number of nodes. Type in the repository, with the options of launch/train.py:
#
#     sbatch launch/clusters/slurm.sh --deepspeed_config ds_configs/zero2_fp16.json -p 4
#
# Before the time limit, and when it is preempted, the job saves, ends and queues itself again; it then resumes from its
# newest checkpoint. After losing ranks it does the same, at most LOST_IN_A_ROW times without a new checkpoint between.
# The run is in runs/slurm-JOB, or where RUN_DIR says. See docs/launchers.md.

# Edit these lines: how many machines, processes on each (as many as it has devices), and for how long.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8
#SBATCH --time=24:00:00

#SBATCH --job-name=ddpm_ds --output=%x-%j.out --open-mode=append
#SBATCH --requeue --signal=B:USR1@300

set -u
run_dir=${RUN_DIR:-runs/slurm-$SLURM_JOB_ID}
lost_in_a_row=${LOST_IN_A_ROW:-3}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

newest() { cat "$run_dir/checkpoints/latest" 2>/dev/null; }

queue_again() {
    # A job that was cancelled is not running any more, although this script is.
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        echo "slurm.sh: $1; queueing job $SLURM_JOB_ID again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

# The ranks that end first don't end the others, which may still have to print an error or upload what is left.
before=$(newest)
srun --kill-on-bad-exit=0 --wait=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "${PYTHON:-python}" -u launch/train.py --run-dir "$run_dir" "$@" &
step=$!
asked=
trap 'asked=yes; kill -USR1 "$step"' USR1 # srun passes it on to all tasks; at SIGTERM it would end them
trap 'asked=yes' TERM                     # preempted or cancelled: Slurm has told the tasks itself
wait "$step"
code=$?
while [ -n "$asked" ]; do # a signal ended the wait, not the ranks
    asked=
    wait "$step"
    ended=$?
    [ "$ended" = 127 ] || code=$ended
done

lost_file=$run_dir.lost
case $code in
0) rm -f "$lost_file" ;;
2 | 3) ;; # bad input, bad numbers: the next start would end the same way
75) queue_again "stopped and saved" ;;
*)
    lost=1
    [ "$(newest)" != "$before" ] || lost=$(($(cat "$lost_file" 2>/dev/null || echo 0) + 1))
    if [ "$lost" -gt "$lost_in_a_row" ]; then
        echo "slurm.sh: exit code $code, $lost times in a row without a new checkpoint; not queued again"
    else
        mkdir -p "$(dirname "$run_dir")" && echo "$lost" >"$lost_file"
        queue_again "exit code $code, $lost of $lost_in_a_row"
    fi
    ;;
esac
exit "$code"
