"""Start of a rank's program; ``python -m ddpm_ds.cli.rank`` trains.

It handles signals before it imports anything slow.
"""

import signal
import sys
from importlib import import_module

from ddpm_ds.ground.errors import EXIT_PREEMPTED
from ddpm_ds.processes.signals import EXIT_INTERRUPTED, STOP_SIGNALS, handle, leave_on


def start(program: str, *, stoppable: bool = False) -> int:
    """Import the module ``program``, run its ``main`` as a rank and return the exit code.

    During the import, stop signals end a ``stoppable`` program silently with 75. Ctrl-C ends others with 130, also
    later.
    """
    leave_on(STOP_SIGNALS, EXIT_PREEMPTED) if stoppable else leave_on([signal.SIGINT], EXIT_INTERRUPTED)
    main = import_module(program).main
    from ddpm_ds.processes.ranks import recorded

    if not stoppable:
        handle([signal.SIGINT], signal.default_int_handler)
    try:
        return recorded(main, stoppable=stoppable)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(start("ddpm_ds.cli.train", stoppable=True))
