"""Train a diffusion U-Net; started by DeepSpeed's launcher, once per process.

deepspeed launch/train.py --deepspeed_config ds_configs/zero2_fp16.json
deepspeed --num_gpus 4 launch/train.py --deepspeed_config ds_configs/zero2_fp16.json -p 2
"""

import sys

from ddpm_ds.exit_record import recorded
from ddpm_ds.train.command import main

if __name__ == "__main__":
    sys.exit(recorded(main))
