"""Train on a Ray cluster, one of Ray's workers for each node, with the options of ``ddpm-ds train``.

python launch/clusters/ray_train.py --workers 2 --gpus 4 -- --deepspeed_config zero2_fp16 --run-dir /runs/digits
"""

import argparse
import subprocess
import sys
from typing import Any

import ray.train
import ray.util
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ddpm_ds.ground.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS
from ddpm_ds.processes.ranks import free_port

FINAL = (0, EXIT_BAD_INPUT, EXIT_BAD_NUMBERS)
"""Exit codes after which another try would end the same way; after others Ray tries again, and the run resumes."""


def node(config: dict[str, Any]) -> int:
    """Start this node's ranks and return their exit code; raises RuntimeError where another try may help."""
    context = ray.train.get_context()
    where = broadcast_from_rank_zero([ray.util.get_node_ip_address(), free_port()])
    words = ["--nodes", context.get_world_size(), "--node-rank", context.get_world_rank()]
    words += ["--master-addr", where[0], "--port", where[1], "--processes", max(1, config["gpus"])]
    command = [sys.executable, "-m", "ddpm_ds.cli.main", "train", *map(str, words), *config["options"]]
    code = subprocess.run(command).returncode
    if code not in FINAL:
        raise RuntimeError(f"ddpm-ds train has ended with exit code {code}; docs/exit_codes.md says what that means")
    return code


def main() -> int:
    """Train, and return the exit code of the first node."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="nodes (default 1)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each node (default none)")
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help="further tries (default 3)")
    parser.add_argument("options", nargs="+", help="options of ddpm-ds train, after --")
    asked = parser.parse_args()
    trainer = DataParallelTrainer(
        node,
        train_loop_config={"gpus": asked.gpus, "options": asked.options},
        scaling_config=ray.train.ScalingConfig(
            num_workers=asked.workers,
            use_gpu=asked.gpus > 0,
            resources_per_worker={"GPU": asked.gpus} if asked.gpus else {"CPU": 1},
            placement_strategy="SPREAD",
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=asked.max_failures)),
    )
    return int(trainer.fit().return_value)


if __name__ == "__main__":
    sys.exit(main())
