"""Transports move ranges of bytes between holders; see `wsync.transports.base`."""
