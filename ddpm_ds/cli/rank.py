"""Start of the programs that a launcher starts on every rank; ``python -m ddpm_ds.cli.rank`` trains.

Imports nothing slow: a signal may come while the program is imported.
"""

import signal
import sys
from importlib import import_module

from ddpm_ds.ground.errors import EXIT_PREEMPTED
from ddpm_ds.processes.signals import EXIT_INTERRUPTED, STOP_SIGNALS, handle, leave_on


def start(program: str, *, stoppable: bool = False) -> int:
    """Import the module ``program``, run its ``main`` as a rank and return the exit code.

    While it is imported, stop signals end this process without a word: with 75 if it is ``stoppable``, as training
    is, and otherwise Ctrl-C with 130, also later.
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
