"""Where the time of a finished run went, and the one change to try next, from the files of its folder."""
