"""Command lines of the project, one module for each verb or group of verbs; they import torch only after the arguments
have been checked.
"""
