"""Processes of a run: hosts, launchers, ranks, their rendezvous and watchdog, requests to stop, the supervisor."""
