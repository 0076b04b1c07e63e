"""What a finished run lost its time to, and the one change to try next; pure, from the files of its folder."""
