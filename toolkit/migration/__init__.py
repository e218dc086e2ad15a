"""The same training under another strategy: read what the files mean, write it for the other side.

What has no equal there is refused with its reason; what changes only speed or logging is told, never dropped
in silence.
"""
