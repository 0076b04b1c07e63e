"""Train a diffusion U-Net; DeepSpeed's launcher starts this in every process.

deepspeed launch/train.py --deepspeed_config ds_configs/zero2_fp16.json
deepspeed --num_gpus 4 launch/train.py --deepspeed_config ds_configs/zero2_fp16.json -p 2
"""

import sys

from ddpm_ds.cli.rank import start

if __name__ == "__main__":
    sys.exit(start("ddpm_ds.cli.train", stoppable=True))
