"""Converts launch files to another strategy: reads their meaning and writes it for the target.

What has no equivalent is rejected with its reason; what only changes speed or logging is reported, never silently
dropped.
"""
