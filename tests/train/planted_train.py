"""launch/train.py with numbers that go bad: the noise of the images FIRST to LAST is multiplied by FACTOR.

PLANTED="FIRST LAST FACTOR" python tests/train/planted_train.py --deepspeed_config ...
"""

from __future__ import annotations

import os
import sys

from ddpm_ds.cli import train as command
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.processes import ranks
from ddpm_ds.train.objective import Denoising, Noised


def main() -> int:
    first, last, factor = map(float, os.environ["PLANTED"].split())
    prepare = Denoising.prepare

    def planted(self: Denoising, micro_batch: MicroBatch) -> Noised:
        prepared = prepare(self, micro_batch)
        bad = (micro_batch.index >= first) & (micro_batch.index <= last)
        eps = prepared.eps.clone()
        eps[bad] *= factor
        return prepared._replace(eps=eps)

    Denoising.prepare = planted  # type: ignore[method-assign]
    ranks.OTHERS_WAIT_SECONDS = 0.0
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
