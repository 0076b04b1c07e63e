"""Where the time and the flops of a run go; watches, and changes nothing that is trained."""
