"""Every command line of the project, one module for each verb; torch is imported once the arguments are good."""
