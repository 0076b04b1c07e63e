"""Command lines of the project, one module for each verb or group of verbs; torch is imported once the arguments are
good.
"""
