"""Score trained weights, drawn by several processes; started by DeepSpeed's launcher, once per process.

deepspeed --num_gpus 4 launch/evaluate.py runs/large --stages 2
"""

import sys

from ddpm_ds.cli.rank import start

if __name__ == "__main__":
    sys.exit(start("ddpm_ds.cli.trained"))
