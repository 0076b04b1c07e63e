"""Being many: hosts, launchers, ranks, their rendezvous and watchdog, requests to stop, the supervisor of a run."""
