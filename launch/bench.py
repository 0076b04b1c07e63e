"""Measure what the engine costs beside a plain PyTorch loop; started by DeepSpeed's launcher in one process.

deepspeed --num_gpus 1 launch/bench.py --deepspeed_config ds_configs/zero2_fp16.json
"""

import sys

from ddpm_ds.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
