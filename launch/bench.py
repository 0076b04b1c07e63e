"""Time ways of training one U-Net beside each other; DeepSpeed's launcher starts this in every process.

deepspeed --num_gpus 2 launch/bench.py --deepspeed_config ds_configs/zero1_fp32.json -p 2
"""

import sys

from ddpm_ds.cli.rank import start

if __name__ == "__main__":
    sys.exit(start("rivals.command"))
